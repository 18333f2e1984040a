"""The demo's configuration: three engines on two sites of one machine, as a ``pdd.toml``."""

import json
from dataclasses import dataclass
from pathlib import Path

from pdd.core.units import parse_duration_s
from pdd.launch.ports import free_ports

DEMO_MODEL = "demo"
"""The name that stands for the prepared SmolLM2, as in ``pdd model demo``."""

_HOST = "127.0.0.1"

_CPU_CATCH_UP = """\
# On a CPU, computing four tokens takes 1.3 times as long as computing one, 32 tokens four times.
catch_up_gap_tokens = 4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the demo's flags chose; quantities as they were typed."""

    model: str
    rate: str
    delay: str
    handoff: str
    pipeline: str
    port: int

    @property
    def rtt_s(self) -> float:
        """Round trip of the line."""
        return 2 * parse_duration_s(self.delay)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """The model as the configuration names it."""

    path: str
    name: str
    dtype: str
    max_model_len: int | None


def own_model(name: str) -> DemoModel:
    """The model that a folder or a Hugging Face name stands for."""
    folder = Path(name)
    is_folder = folder.is_dir()
    return DemoModel(
        path=str(folder.resolve()) if is_folder else name,
        name=folder.resolve().name if is_folder else name,
        dtype="auto",
        max_model_len=None,
    )


def demo_config(settings: DemoSettings, model: DemoModel, *, run_dir: Path) -> str:
    """The text of the configuration file; every internal port is one that is free now."""
    ports = iter(free_ports(13))
    p, rld, md = ([next(ports) for _ in range(3)] for _ in range(3))
    wan = [next(ports) for _ in range(3)]
    small = model.max_model_len is not None
    sizes = ("512MiB", "1GiB") if small else ("2GiB", "4GiB")
    forwards = "".join(
        _forward(what, near, far)
        for what, near, far in zip(("MD's API", "MD's KV", "MD's agent"), wan, md, strict=True)
    )
    return f"""# Written by pdd demo: site "a" with P and RLD, site "b" with MD, an emulated line.
run_dir = {_text(str(run_dir))}

[model]
path = {_text(model.path)}
name = {_text(model.name)}
dtype = {_text(model.dtype)}
{f"max_model_len = {model.max_model_len}" if small else "# max_model_len: the model's own"}

[router]
port = {settings.port}
pipeline = {_text(settings.pipeline)}
handoff = {_text(settings.handoff)}
drain_timeout_s = 5

[policy]
assumed_wan_rate = {_text(settings.rate)}
assumed_wan_rtt_s = "{settings.rtt_s * 1000:g}ms"
# The script's answers are short so that it ends soon; the outlier filter would keep them all from site b.
outlier_margin_ratio = 0
{_CPU_CATCH_UP if small else ""}\
{_engine("p0", "prefill", "a", p, sizes)}
{_engine("rld0", "relay", "a", rld, sizes)}
{_engine("md0", "main", "b", md, sizes)}\
# Site a reaches site b through the line only.
url = {_text(f"http://{_HOST}:{wan[0]}")}
advertise = {_text(f"{_HOST}:{wan[1]}")}
control_url = {_text(f"http://{_HOST}:{wan[2]}")}

[[links]]
name = "wan"
rate = {_text(settings.rate)}
delay = {_text(settings.delay)}
control = {_text(f"{_HOST}:{next(ports)}")}
{forwards}"""


def _engine(engine_id: str, role: str, site: str, ports: list[int], sizes: tuple[str, str]) -> str:
    return f"""
[[engines]]
id = {_text(engine_id)}
role = {_text(role)}
site = {_text(site)}
port = {ports[0]}
data_port = {ports[1]}
control_port = {ports[2]}
primary_bytes = {_text(sizes[0])}
store_bytes = {_text(sizes[1])}
"""


def _forward(what: str, near: int, far: int) -> str:
    return f"""
[[links.forwards]] # {what}
listen = {_text(f"{_HOST}:{near}")}
target = {_text(f"{_HOST}:{far}")}
"""


def _text(value: str) -> str:
    """A TOML string; JSON's escapes are a subset of TOML's."""
    return json.dumps(value)

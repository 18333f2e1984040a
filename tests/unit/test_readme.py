"""What the README shows is true: its configuration loads, and each command it names exists."""

import re
from pathlib import Path

from pdd.cli.main import make_parser
from pdd.config.load import load_config

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_configuration_in_the_readme_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "pdd.toml"
    path.write_text(example, encoding="utf-8")
    config = load_config(path, environ={})
    assert [engine.role for engine in config.engines] == ["prefill", "relay", "main"]
    assert config.tls.cert.endswith("certs/{engine}.crt")


def test_every_command_in_the_readme_exists() -> None:
    (actions,) = (a.choices for a in make_parser()._actions if a.choices and "serve" in a.choices)
    named = set(re.findall(r"(?:^|`)pdd ([a-z]+)", README, flags=re.MULTILINE))
    assert named
    assert named <= set(actions or ())

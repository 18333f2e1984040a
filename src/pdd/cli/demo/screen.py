"""Shows what the launcher does: moving lines in a terminal, plain ones elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from pdd.core.units import format_duration_s
from pdd.launch.supervisor import Progress

TITLES = {
    "model": "model",
    "engine-p0": "site a   engine P    (prefill)",
    "engine-rld0": "site a   engine RLD  (relay decode)",
    "engine-md0": "site b   engine MD   (main decode)",
    "engine-reference": "         plain engine for comparison",
    "agent-p0": "site a   agent of P",
    "agent-rld0": "site a   agent of RLD",
    "agent-md0": "site b   agent of MD",
    "link": "a <-> b  emulated line",
    "router": "site a   router",
}


class Screen:
    """Progress of all programs; use as a context manager while they start."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars: Bars | None = None
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = (
                SpinnerColumn(finished_text="[green]+[/]"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=self.console)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def show(self, progress: Progress) -> None:
        """The change is on the screen; of the end only what nobody asked for."""
        title = TITLES.get(progress.name, progress.name)
        if progress.state in ("stopping", "stopped"):
            return
        if self._bars is None:
            if progress.state != "starting" or not self.console.is_terminal:
                took = f" after {format_duration_s(progress.elapsed_s)}" if progress.elapsed_s else ""
                detail = f": {progress.detail}" if progress.detail else ""
                self.console.print(f"{title} {progress.state}{took}{detail}", markup=False, highlight=False)
            return
        row = self._rows.get(progress.name)
        if row is None:
            row = self._rows[progress.name] = self._bars.add_task(title, total=1)
        done = progress.state in ("ready", "ended")
        self._bars.update(row, description=f"{title:<38} {progress.state}", completed=int(done))

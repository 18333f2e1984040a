"""An emulated line with its forwards: what tests use in their process and ``pdd link`` runs as a program."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdd.config.schema import LinkConfig
from pdd.core.errors import ConfigurationError
from pdd.link.line import Line
from pdd.link.relay import Forward, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardState:
    """Counters of one forward: payload bytes that have crossed the line, by direction."""

    listen: str
    target: str
    connections: int
    held: bool
    to_target_bytes: int
    to_client_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """What a line is set to and what has crossed it."""

    name: str
    rate_bytes_per_s: float
    delay_s: float
    forwards: tuple[ForwardState, ...]


class LinkEmulator:
    """A line between two sites, usable as ``async with LinkEmulator(config) as link``.

    All forwards share the rate. Clients sit at one site and targets at the other, so each direction of the
    line carries the same direction of every forward.

    Args:
        config: Rate, delay and forwards; a listening port of 0 takes a free one.
    """

    def __init__(self, config: LinkConfig) -> None:
        self._config = config
        self._lines = tuple(Line(rate_bytes_per_s=config.rate, delay_s=config.delay) for _ in range(2))
        self._forwards: list[Forward] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Every forward is listened at.

        Raises:
            ConfigurationError: If an address cannot be bound; nothing is listened at then.
        """
        loop = asyncio.get_running_loop()
        to_target, to_client = (Wire(line, loop) for line in self._lines)
        for forward_config in self._config.forwards:
            forward = Forward(
                listen=split_address(forward_config.listen),
                target=split_address(forward_config.target),
                to_target=to_target,
                to_client=to_client,
            )
            try:
                await forward.start()
            except OSError as error:
                await self.close()
                where = f"link {self._config.name!r} cannot listen at {forward_config.listen}"
                raise ConfigurationError(f"{where}: {error.strerror or error}") from error
            self._forwards.append(forward)

    async def close(self) -> None:
        """Nothing is listened at and every connection has been reset."""
        for forward in self._forwards:
            await forward.close()
        self._forwards.clear()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each forward is listened at, in the configuration's order."""
        return tuple(_join(forward.listen) for forward in self._forwards)

    def state(self) -> LinkState:
        """Settings and counters now."""
        return LinkState(
            name=self._config.name,
            rate_bytes_per_s=self._lines[0].rate_bytes_per_s,
            delay_s=self._lines[0].delay_s,
            forwards=tuple(
                ForwardState(
                    listen=_join(forward.listen),
                    target=_join(forward.target),
                    connections=len(forward.connections),
                    held=forward.held,
                    to_target_bytes=forward.traffic.to_target_bytes,
                    to_client_bytes=forward.traffic.to_client_bytes,
                )
                for forward in self._forwards
            ),
        )

    def set_line(
        self, *, rate_bytes_per_s: float | None = None, delay_s: float | None = None, **others: float
    ) -> None:
        """Bytes that enter the wire from now on meet the new rate and delay.

        Raises:
            ValueError: If there are ``others``: they are about packets, and there are none here.
        """
        if others:
            raise ValueError(f"the relay cannot show {', '.join(sorted(others))}; the packet emulator can")
        for line in self._lines:
            line.rate_bytes_per_s = rate_bytes_per_s or line.rate_bytes_per_s
            line.delay_s = line.delay_s if delay_s is None else delay_s

    def hold(self, forward: str | None = None) -> None:
        """All bytes of one forward (named by its listening address), or of all, stand still.

        Raises:
            KeyError: If there is no such forward.
        """
        for found in self._find(forward):
            found.hold(held=True)

    def resume(self, forward: str | None = None) -> None:
        """What was held moves again, in order.

        Raises:
            KeyError: If there is no such forward.
        """
        for found in self._find(forward):
            found.hold(held=False)

    def cut(self, forward: str | None = None) -> int:
        """All connections are reset at both ends; new ones may follow. Returns how many there were.

        Raises:
            KeyError: If there is no such forward.
        """
        return sum(found.cut() for found in self._find(forward))

    def _find(self, listen: str | None) -> list[Forward]:
        found = [forward for forward in self._forwards if listen is None or _join(forward.listen) == listen]
        if not found:
            raise KeyError(listen)
        return found


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; brackets around an IPv6 host are dropped."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _join(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

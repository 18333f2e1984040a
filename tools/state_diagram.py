"""Writes the state diagram of a request into docs/explanation/handoff.md, from the state machine's own table.

For every (phase, event) of the table, in every state that a request over one P, one RLD and two MDs can
come to, the machine is asked what it does; what it did is the diagram. Run it after a change of
src/pdd/router/request/machine; a test compares the page with what this would write::

    .venv/bin/python tools/state_diagram.py
"""

import copy
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pdd.policy.handoff import CatchUp
from pdd.router.request import events as ev
from pdd.router.request.machine.state import Phase
from pdd.router.request.machine.table import TABLE, RequestMachine

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "handoff.md"
BEGIN, END = "```mermaid\nstateDiagram-v2\n", "```\n"
EVERYWHERE = (ev.ClientGone, ev.DeadlinePassed, ev.StopMatched)
"""They end a request from every state alike; the page says so in words."""
MAX_ATTEMPTS = 2
"""Of the pipeline; a further one begins in a state that was seen."""
PLAN = ev.Plan(
    pipeline="p-rld-md",
    prefills=("p0",),
    relays=("rld0",),
    mains=("md0", "md1"),
    max_tokens=3,
    prompt_tokens=0,
)
PLANS = (PLAN, replace(PLAN, pipeline="p-md"))
CATCH_UPS = tuple(CatchUp(stop_gap_tokens=0, max_rounds=rounds, block_tokens=2) for rounds in (1, 2))
LOST = ev.Failure(kind="engine_lost", message="")
REFUSED = ev.Failure(kind="engine_error", message="", retryable=False)
TOKEN = ev.Token(id=1)
Edges = Mapping[tuple[Phase, Phase], set[str]]


def candidates(machine: RequestMachine) -> Iterator[ev.Event]:
    """Every event the table knows in the machine's phase, for each leg and transfer it can be about."""
    kinds = {event for phase, event in TABLE if phase is machine.phase and event not in EVERYWHERE}
    legs = list(machine.legs)
    waiting = [key for key, state in machine.transfers.items() if state == "open"]
    all_of: dict[type, list[ev.Event]] = {
        ev.Planned: [ev.Planned(plan=plan) for plan in PLANS],
        ev.Prefilled: [
            ev.Prefilled(leg=leg, token=TOKEN, finish=finish) for leg in legs for finish in ("length", "stop")
        ],
        ev.Landed: [ev.Landed(attempt=attempt, peer=peer) for attempt, peer in waiting],
        ev.TransferFailed: [
            ev.TransferFailed(attempt=attempt, peer=peer, reason="") for attempt, peer in waiting
        ],
        ev.TransferStalled: [ev.TransferStalled(attempt=attempt, peer=peer) for attempt, peer in waiting],
        ev.Tokens: [
            ev.Tokens(leg=leg, tokens=(TOKEN,), finish=finish) for leg in legs for finish in (None, "stop")
        ],
        ev.HandoffChosen: [
            ev.HandoffChosen(mode=mode, catch_up=catch_up)
            for catch_up in CATCH_UPS
            for mode in ("one-shot", "catch-up")  # type: ignore[misc]
        ],
        ev.RoundDone: [ev.RoundDone(leg=leg) for leg in legs],
        ev.LegFailed: [ev.LegFailed(leg=leg, failure=failure) for leg in legs for failure in (LOST, REFUSED)],
        ev.EnginesNow: [
            ev.EnginesNow(prefills=PLAN.prefills, relays=PLAN.relays, mains=PLAN.mains),
            ev.EnginesNow(prefills=(), relays=(), mains=PLAN.mains),
            ev.EnginesNow(prefills=(), relays=(), mains=()),
        ],
        ev.PauseOver: [ev.PauseOver()],
    }
    for kind in kinds:
        yield from all_of[kind]


def summary(machine: RequestMachine) -> str:
    """What two machines have in common that do the same from here on; legs have no numbers in it."""
    known = dict(vars(machine))
    for left_out in ("failures", "legs", "next_leg", "effects", "last_failure", "was_resumed"):
        del known[left_out]
    attempt = known.pop("attempt")
    known["tokens"] = len(machine.tokens)
    known["base_position"] = len(machine.tokens) - known["base_position"]
    known["round_position"] = len(machine.tokens) - known["round_position"]
    known["eager_tokens"] = min(machine.eager_tokens, PLAN.hold_tokens)
    known["transfers"] = {peer: state for (of, peer), state in machine.transfers.items() if of == attempt}
    for who in ("speaker", "round"):
        known[who] = machine.legs.get(known[who])
    for engines in ("failed", "unreachable"):
        known[engines] = sorted(known[engines])
    return repr(sorted(known.items()))


def copy_of(machine: RequestMachine) -> RequestMachine:
    """A machine of its own in the same state; what is in its containers is never changed."""
    other = copy.copy(machine)
    for attribute, value in vars(machine).items():
        if isinstance(value, array | dict | list | set):
            setattr(other, attribute, copy.copy(value))
    return other


def explore() -> Edges:
    """Every change of phase that some event brings about, with the events that do."""
    edges: dict[tuple[Phase, Phase], set[str]] = defaultdict(set)
    first = RequestMachine()
    seen, todo = {summary(first)}, deque([first])
    while todo:
        machine = todo.popleft()
        for event in candidates(machine):
            after = copy_of(machine)
            after.step(event)
            after.check_invariants()
            if after.phase is not machine.phase or type(event) is ev.RoundDone:
                edges[machine.phase, after.phase].add(type(event).__name__)
            goes_on = after.phase is not Phase.DONE and after.attempt <= MAX_ATTEMPTS
            if goes_on and (known := summary(after)) not in seen:
                seen.add(known)
                todo.append(after)
    return edges


def diagram() -> str:
    """The diagram's lines."""
    lines = [f"    [*] --> {name(Phase.RENDERING)}"]
    order = list(Phase)
    for (before, after), events in sorted(
        explore().items(), key=lambda item: (order.index(item[0][0]), order.index(item[0][1]))
    ):
        lines.append(f"    {name(before)} --> {name(after)}: {', '.join(sorted(events))}")
    return "\n".join([*lines, f"    {name(Phase.DONE)} --> [*]"]) + "\n"


def name(phase: Phase) -> str:
    """A phase as mermaid takes it."""
    return phase.value.replace(" ", "_")


def render(page: str) -> str:
    """The page with the diagram as it is now."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + diagram() + END + rest.split(END, 1)[1]


def main() -> int:
    """The page is written; 0."""
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The commands that simulate nothing: ``pdd feasible``, ``pdd bathtub`` and ``pdd chips``."""

from dataclasses import asdict

from rich.console import Console

from pdd.sim.bathtub import bathtub, find_valley
from pdd.sim.chips import load_chips, rate_chips
from pdd.sim.commands.output import add_assumptions, print_json, print_table
from pdd.sim.commands.scenario_argument import Arguments, scenario_of
from pdd.sim.feasible import feasible
from pdd.sim.fleet import build_parts
from pdd.sim.report import Report


def run_feasible(arguments: Arguments) -> int:
    """Both questions have been answered."""
    scenario = scenario_of(arguments)
    result = feasible(scenario)
    if arguments.html:
        report = Report(f"Feasibility: {scenario.title or 'PDD'}")
        report.paragraph(result["verdict"])
        for section in ("bandwidth", "latency"):
            report.heading(section)
            report.table(("what", "value"), list(result[section].items()))
        use = {
            key: result["bandwidth"][key]
            for key in ("without_drc_gbit_per_s", "with_drc_gbit_per_s", "line_gbit_per_s")
        }
        report.bars(use, y_label="Gbit/s")
        add_assumptions(report, scenario)
        report.write(arguments.html)
    if arguments.json:
        print_json(result)
        return 0
    for section in ("bandwidth", "latency"):
        print_table((section, ""), list(result[section].items()))
    Console().print(
        f"{result['verdict']}; screened rate {result['carried_rps_screened']:.2f} req/s, bound by "
        f"{result['binding']}"
    )
    return 0


def run_bathtub(arguments: Arguments) -> int:
    """The curve has been computed and its valley named."""
    scenario = scenario_of(arguments)
    model = build_parts(scenario).role(scenario.fleet.prefill, "prefill")
    points = bathtub(model, prompt_tokens=arguments.prompt_tokens, discount=arguments.cached_price)
    valley = find_valley(points)
    if arguments.html:
        report = Report("The hit-rate bathtub")
        report.paragraph(valley.advice)
        report.curves(
            {
                "revenue": [(point.hit_ratio, point.revenue) for point in points],
                "tail chunks merged": [(point.hit_ratio, point.merged_revenue) for point in points],
            },
            x_label="hit ratio",
            y_label="revenue per engine-second (missed token = 1)",
        )
        report.curves(
            {"prompt tokens/s": [(p.hit_ratio, p.throughput) for p in points]},
            x_label="hit ratio",
            y_label="tokens/s",
        )
        add_assumptions(report, scenario)
        report.write(arguments.html)
    if arguments.json:
        print_json({"valley": asdict(valley), "points": [asdict(point) for point in points]})
        return 0
    print_table(
        ("hit", "prefill s", "tokens/s", "revenue/s", "merged"),
        [
            (p.hit_ratio, p.prefill_s, p.throughput, p.revenue, p.merged_revenue)
            for p in points[:: len(points) // 20]
        ],
    )
    Console().print(valley.advice)
    if valley.dips:
        Console().print("dips of tail chunks at hit " + ", ".join(f"{dip:.0%}" for dip in valley.dips))
    return 0


def run_chips(arguments: Arguments) -> int:
    """The table of chips has been printed with each one's role."""
    ratings = rate_chips(load_chips(arguments.chips), reference=arguments.reference)
    header = (
        "chip",
        "compute",
        "memory",
        "bandwidth",
        "link",
        "FLOP/B",
        "PF/s/$",
        "TB/s/$",
        "price/h",
        "role",
    )
    rows = [
        (
            r.chip.name,
            r.compute_ratio,
            r.capacity_ratio,
            r.bandwidth_ratio,
            r.link_ratio,
            r.flops_per_byte,
            r.prefill_value,
            r.decode_value,
            r.chip.price_per_hour,
            r.role,
        )
        for r in ratings
    ]
    if arguments.html:
        report = Report("Chips for prefill and decode")
        report.table(
            (*header, "why", "source"),
            [(*row, r.reason, r.chip.source) for row, r in zip(rows, ratings, strict=True)],
        )
        report.bars({r.chip.name: r.flops_per_byte for r in ratings}, y_label="FLOP per byte")
        report.write(arguments.html)
    if arguments.json:
        print_json({"reference": arguments.reference, "chips": [asdict(rating) for rating in ratings]})
        return 0
    print_table(header, rows)
    return 0

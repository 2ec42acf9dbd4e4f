"""Plans as one HTML page that needs no other file, script or network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from replicax._units import of_bytes, of_count, of_seconds, of_share
from replicax.planning._charts import Bar, bars, curve
from replicax.planning._plan import Plan, Scaling

_MANY = 20  # the most rows that a table shows
_TIMES = ("compute", "memory", "communication")


def page(scaling: Scaling) -> str:
    """Return the text of the page. Everything that comes from the user is escaped."""
    plans = scaling.plans
    title = f"Plan of {plans[0].program} for {', '.join(plan.topology for plan in plans)}"
    parts = [f"<h1>{escape(title)}</h1>", *(_verdict(plan) for plan in plans), _warnings(plans)]
    parts += [_overview(scaling), _memory(plans), _times(plans)]
    parts += [_details(plan) for plan in plans]
    style = files("replicax.planning").joinpath("_page.css").read_text(encoding="utf-8")
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{style}</style></head>'
        f"<body><main>{''.join(parts)}"
        "<footer>Times are estimates from published figures of the chips. Nothing was run."
        "</footer></main></body></html>\n"
    )


def _verdict(plan: Plan) -> str:
    needed, capacity = plan.memory.needed, plan.memory.capacity
    said = f"Needs {of_bytes(needed)} of memory"
    if capacity is not None:
        said = f"{'Fits' if plan.fits else 'Does not fit'}: {of_share(needed / capacity)} of memory"
    if plan.estimate is not None:
        said += f"; bound by {plan.estimate.bound}"
    kind = "verdict" if plan.fits else "verdict bad"
    return f'<p class="{kind}"><b>{escape(plan.topology)}</b> {escape(said)}.</p>'


def _warnings(plans: Sequence[Plan]) -> str:
    topologies: dict[str, list[str]] = {}
    for plan in plans:
        for warning in plan.warnings:
            topologies.setdefault(warning, []).append(plan.topology)
    return "".join(
        f'<p class="warning" role="alert"><b>{escape(", ".join(names))}</b> {_with_code(said)}</p>'
        for said, names in topologies.items()
    )


def _with_code(words: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(words))


def _overview(scaling: Scaling) -> str:
    rows = [
        (
            plan.topology,
            str(plan.chips),
            f"{plan.replicas} x {plan.devices_per_replica}",
            "" if plan.batch is None else str(plan.batch),
            of_bytes(plan.memory.needed),
            "yes" if plan.fits else "no",
            of_seconds(plan.estimate.step) if plan.estimate else "",
            plan.estimate.bound if plan.estimate else "",
            of_count(plan.rows_per_second) if plan.rows_per_second else "",
            of_share(scaling.efficiency(plan) or 0.0) if plan.rows_per_second else "",
        )
        for plan in scaling.plans
    ]
    names = (
        "topology", "chips", "replicas", "batch", "memory per device", "fits", "step",
        "bound by", "rows per second", f"per chip, relative to {scaling.plans[0].topology}",
    )  # fmt: skip
    shown = _table(names, rows)
    rates = [(plan.chips, plan.rows_per_second) for plan in scaling.plans]
    points = sorted((float(chips), rate) for chips, rate in rates if rate)
    if len(points) > 1:
        title = "Rows per second by number of chips; dashed: in proportion to the chips"
        shown += f"<h2>Scaling</h2><p>{title}.</p>{curve(title, points, of_count)}"
    return shown


def _memory(plans: Sequence[Plan]) -> str:
    title = "Memory of a device by kind; the mark is its capacity"
    rows = [Bar(plan.topology, plan.memory.kinds(), plan.memory.capacity) for plan in plans]
    kinds = [kind for kind, _ in plans[0].memory.kinds()]
    return f"<h2>Memory</h2><p>{title}.</p>{bars(rows, of_bytes)}" + _table(
        ("topology", *kinds, "needed", "capacity"),
        [
            (
                plan.topology,
                *(of_bytes(count) for _, count in plan.memory.kinds()),
                of_bytes(plan.memory.needed),
                "" if plan.memory.capacity is None else of_bytes(plan.memory.capacity),
            )
            for plan in plans
        ],
    )


def _times(plans: Sequence[Plan]) -> str:
    timed = [(plan, plan.estimate) for plan in plans if plan.estimate is not None]
    if not timed:
        return ""
    title = "Estimated time of a step: computing or memory, whichever takes longer, then the rest"
    rows = [
        Bar(
            plan.topology,
            [
                ("compute", times.compute if times.compute >= times.memory else 0.0),
                ("memory", times.memory if times.compute < times.memory else 0.0),
                ("communication", times.communication),
            ],
        )
        for plan, times in timed
    ]
    cells = [
        (plan.topology, *(of_seconds(getattr(times, name)) for name in (*_TIMES, "step")))
        for plan, times in timed
    ]
    return f"<h2>Time</h2><p>{title}.</p>{bars(rows, of_seconds)}" + _table(
        ("topology", *_TIMES, "step"), cells
    )


def _details(plan: Plan) -> str:
    collectives = sorted(plan.collectives, key=lambda each: -each.sent_bytes)
    shown = f"<h2>{escape(plan.topology)}</h2>"
    if not plan.fits:
        shown += "<p>The step does not fit, so there is no program to read this from.</p>"
    shown += "<h3>Communication in a step</h3>" + _table(
        ("collective", "bytes", "groups x chips", "times", "from"),
        [
            (
                each.kind,
                of_bytes(each.bytes),
                f"{each.groups} x {each.group_size}",
                f"{each.times}{'' if each.exact else ' or more'}",
                ", ".join(f"{origin} ({of_bytes(origin.bytes)})" for origin in each.origins),
            )
            for each in collectives
        ],
    )
    shown += "<h3>Variables</h3>" + _table(
        ("variable", "shape", "dtype", "bytes per device", "whole on every device"),
        [
            (
                each.name,
                str(each.shape),
                each.dtype,
                of_bytes(each.bytes),
                "yes" if each.whole else "no",
            )
            for each in plan.variables
        ],
    )
    return shown + (
        f"<p>{escape(of_count(plan.flops, 'FLOP'))} per device and step. Traced in "
        f"{escape(of_seconds(plan.seconds_to_trace))}, compiled in "
        f"{escape(of_seconds(plan.seconds_to_compile))}.</p>"
    )


def _table(names: Sequence[str], rows: Sequence[Iterable[str]]) -> str:
    if not rows:
        return "<p>None.</p>"
    shown = [list(row) for row in rows[:_MANY]]
    kinds = [
        ' class="number"' if all(re.match(r"<?\d|$", cell) for cell in column) else ""
        for column in zip(*shown, strict=True)
    ]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>'
        for name, kind in zip(names, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in shown
    )
    more = f"<p>And {len(rows) - _MANY} more.</p>" if len(rows) > _MANY else ""
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{more}"
    )

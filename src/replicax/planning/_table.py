"""Plans on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replicax._tables import empty_table
from replicax._units import of_bytes, of_count, of_seconds, of_share
from replicax.planning._collectives import Collective
from replicax.planning._plan import Memory, Plan, Scaling

_MANY = 12  # collectives that are shown one by one


def plan_table(plan: Plan) -> RenderableType:
    """Show one plan: memory, communication, time, warnings."""
    shown: list[RenderableType] = [Text(heading(plan), "bold"), _memory(plan.memory)]
    if plan.collectives:
        shown.append(_collectives(plan))
    if plan.fits:
        shown.append(_times(plan))
    shown += [Text(f"Warning: {warning}", "yellow") for warning in plan.warnings]
    return _spaced(shown)


def scaling_table(scaling: Scaling) -> RenderableType:
    """Show several plans, one per line, with the warnings of each."""
    warnings = [
        Text(f"Warning, {plan.topology}: {warning}", "yellow")
        for plan in scaling.plans
        for warning in plan.warnings
    ]
    return _spaced([scaling_curve(scaling), *warnings])


def scaling_curve(scaling: Scaling) -> RenderableType:
    """Show several plans, one per line."""
    table = empty_table(f"{scaling.plans[0].program}: scaling")
    for name in ("topology", "chips", "batch", "memory", "step"):
        table.add_column(name, justify="left" if name == "topology" else "right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("rows/s", justify="right")
    table.add_column("per chip", justify="right", no_wrap=True)
    table.caption = f"per chip: rows/s per chip, relative to {scaling.plans[0].topology}"
    table.caption_justify = "left"
    for plan in scaling.plans:
        times, efficiency = plan.estimate, scaling.efficiency(plan)
        table.add_row(
            plan.topology,
            str(plan.chips),
            "" if plan.batch is None else str(plan.batch),
            of_bytes(plan.memory.needed) + ("" if plan.fits else " (too much)"),
            of_seconds(times.step) if times else "",
            times.bound if times else "",
            of_count(plan.rows_per_second) if plan.rows_per_second else "",
            of_share(efficiency) if efficiency else "",
        )
    return table


def heading(plan: Plan) -> str:
    """Summarize the plan in one line."""
    replicas = f"{plan.replicas} replica{'s' if plan.replicas > 1 else ''}"
    devices = plan.devices_per_replica
    each = "one device" if devices == 1 else f"{devices} devices"
    batch = "" if plan.batch is None else f", global batch {plan.batch}"
    chips = f"{plan.chips} chip{'s' if plan.chips > 1 else ''}"
    return f"{plan.program} on {plan.topology}: {chips}, {replicas} of {each}{batch}"


def times_of(plan: Plan) -> list[tuple[str, str, str]]:
    """Return each kind of work of a device in a step, its amount, and how long it takes."""
    sent = sum(collective.sent_bytes for collective in plan.collectives)
    times = plan.estimate
    work = (
        ("compute", of_count(plan.flops, "FLOP")),
        ("memory", f"{of_bytes(plan.bytes_accessed)} read and written"),
        ("communication", f"{of_bytes(sent)} sent"),
    )
    rows = [
        (name, amount, of_seconds(getattr(times, name)) if times else "") for name, amount in work
    ]
    return [*rows, ("step", "", of_seconds(times.step))] if times else rows


def times_over(collective: Collective) -> str:
    """Say how often a collective runs in a step."""
    return f"{collective.times}{'' if collective.exact else ' or more'}"


def _memory(memory: Memory) -> Table:
    table = empty_table("Memory of a device")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("of the device", justify="right")
    for kind, count in memory.kinds():
        table.add_row(kind, of_bytes(count), _of_device(count, memory))
    table.add_section()
    table.add_row("needed", of_bytes(memory.needed), _of_device(memory.needed, memory))
    if memory.capacity is not None:
        table.add_row(
            "there is", of_bytes(memory.capacity), "fits" if memory.fits else "too little"
        )
    return table


def _of_device(count: int, memory: Memory) -> str:
    return of_share(count / memory.capacity) if memory.capacity else ""


def _collectives(plan: Plan) -> Table:
    table = empty_table("Communication in a step")
    table.add_column("collective")
    table.add_column("bytes", justify="right")
    table.add_column("group", justify="right")
    table.add_column("times", justify="right")
    table.add_column("from")
    ordered = sorted(plan.collectives, key=lambda each: -each.sent_bytes)
    for each in ordered[:_MANY]:
        groups = f"{each.groups} x {each.group_size}"
        origins = ", ".join(map(str, each.origins))
        table.add_row(each.kind, of_bytes(each.bytes), groups, times_over(each), origins)
    if len(ordered) > _MANY:
        rest = ordered[_MANY:]
        table.add_row(f"{len(rest)} more", of_bytes(sum(each.bytes for each in rest)), "", "", "")
    return table


def _times(plan: Plan) -> Table:
    table = empty_table("Time of a step, estimated from published figures")
    table.add_column("for")
    table.add_column("work of a device", justify="right")
    table.add_column("estimated", justify="right")
    for name, amount, seconds in times_of(plan):
        if name == "step":
            table.add_section()
        table.add_row(name, amount, seconds)
    return table


def _spaced(shown: list[RenderableType]) -> Group:
    parts: list[RenderableType] = []
    for each in shown:
        parts += [Text(""), each] if parts else [each]
    return Group(*parts)

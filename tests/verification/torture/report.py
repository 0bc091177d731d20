"""A run as a page (Markdown): the verdict, each checker, each nemesis against its bound, and every step."""

from __future__ import annotations

import itertools
import os
import platform
from collections import Counter

from tests.verification.torture.checkers import ASKS_OVER_S, ASKS_PER_S, NOISE_S, median
from tests.verification.torture.torture import Result

SHOWN = 20
"""Of the violations that one checker found, so many are shown."""


def report(result: Result) -> str:
    """The whole page."""
    parts = (_head, _checks, _nemeses, _sets, _overlaps, _harm, _steps)
    return "\n".join(line for part in parts for line in [*part(result), ""])


def command(result: Result) -> str:
    told = " ".join(f'--{name}="{value}"' for name, value in result.told.items() if value)
    more = f" ARGS='{told}'" if told else ""
    return (
        f"make torture MINUTES={result.minutes:g} SEED={result.seed} DATABASE={result.database}"
        f" TAKEOVER={result.takeover}{more}"
    )


def verdict(result: Result) -> str:
    """The last line of a run."""
    faults = sum(len(step.fired) for step in result.steps)
    done = f"{faults} faults in {len(result.steps)} steps, {result.took_s:.0f} s, seed {result.seed}"
    found = len(result.violations)
    violations = "1 violation" if found == 1 else f"{found} violations"
    return f"torture: PASSED: {done}" if not found else f"torture: FAILED: {violations}; {done}"


def _head(result: Result) -> list[str]:
    terms = {belief.token for belief in result.history.beliefs()}
    writes = result.history.of_kind("write")
    refused = Counter(line.details.get("error") for line in writes if not line.ok)
    summary = (
        f"{len(terms)} terms; {sum(line.ok for line in writes)} fenced writes acknowledged,"
        f" {refused.pop('Fenced', 0)} refused by the fence, {sum(refused.values())} failed otherwise;"
        f" {result.ticks} unfenced writes, {result.stale_ticks} of them after one of a later term.\n"
        f"{result.lost} acknowledged fenced writes are gone."
    )
    return [
        f"# Torture: {result.version}, `{result.takeover}`",
        "",
        f"`{command(result)}`, TTL {result.ttl:g} s, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        f"**{verdict(result)}**",
        "",
        summary,
        "",
        "![Who led when](timeline.svg)",
    ]


def _checks(result: Result) -> list[str]:
    out = ["## Checkers", "", "| checker | violations |", "|---|---|"]
    out += [f"| {name} | {len(found) or 'none'} |" for name, found in result.checks.items()]
    return out + [f"\n- {name}: {text}" for name, found in result.checks.items() for text in found[:SHOWN]]


def _nemeses(result: Result) -> list[str]:
    counts = Counter(one.nemesis for step in result.steps for one in step.fired)
    explained = (
        "Alone: the longest stretch without a leader because of it.\n"
        "The bound is that of docs/guarantees.md for what was really done (the largest of the run is shown);"
        f" {NOISE_S:g} s is added for noise, and the time in which the machine stood still."
    )
    out = [
        "## Nemeses, and the time without a leader",
        "",
        explained,
        "",
        f"| nemesis | what | fired (at least {result.least}) | alone | median | longest | bound | kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for nemesis in result.nemeses:
        alone = [one for one in result.recoveries if one.alone and one.step.fired[0].nemesis == nemesis.name]
        took = [one.took_s for one in alone]
        figures = (
            f"{median(took):.2f} s | {max(took):.2f} s | {max(one.bound_s for one in alone):.2f} s |"
            f" {'yes' if all(one.kept for one in alone) else '**no**'}"
            if alone
            else "- | - | - | -"
        )
        out.append(f"| {nemesis.name} | {nemesis.what} | {counts[nemesis.name]} | {len(alone)} | {figures} |")
    for one in result.outcomes:
        kept = "**no**" if one.violations else "yes"
        took = f"{one.took_s:.2f} s | {one.took_s:.2f} s | {one.bound_s:.2f} s" if one.bound_s else "- | - | -"
        out.append(f"| {one.name} | {one.what} (servers and nodes of its own) | 1 | 1 | {took} | {kept} |")
    company = [one for one in result.recoveries if not one.alone]
    if company:
        took = [one.took_s for one in company]
        kept = "yes" if all(one.kept for one in company) else "**no**"
        out.append(
            f"| *several at once* | after the last was healed | {len(company)} | - | {median(took):.2f} s |"
            f" {max(took):.2f} s | {company[0].bound_s:.2f} s | {kept} |"
        )
    if result.never_alone:
        names = ", ".join(result.never_alone)
        out.append(f"\nNever struck alone, so their own bounds were not measured (a longer run does it): {names}.")
    return out + [f"\nLeft out for want of {what}: {why}." for what, why in result.missing.items()]


def _sets(result: Result) -> list[str]:
    forms = {"naive": "a lease", "dated": "the same, with a look at the own clock", "fenced": "Tenure's fence"}
    out = ["## The set workload", "", "| who may write | acknowledged | lost |", "|---|---|---|"]
    for form, what in forms.items():
        if one := result.sets.get(form):
            out.append(f"| {what} | {one.acknowledged} | {len(one.lost)} |")
    return out


def _overlaps(result: Result) -> list[str]:
    if result.takeover != "instant":
        return []
    widths = [width for width, _ in result.permitted]
    cuts = sum(len(one.cuts) for step in result.steps for one in step.fired)
    out = ["## The one window of instant mode", "", f"{len(widths)} overlaps in {cuts} cuts of members' connections."]
    if widths:
        marks = (0, 1, 10, 100, 1000, float("inf"))
        out += ["", "| wider than | and not wider than | overlaps |", "|---|---|---|"]
        for low, high in itertools.pairwise(marks):
            number = sum(low < width <= high for width in widths)
            out.append(f"| {low:g} ms | {'0.9 TTL' if high == float('inf') else f'{high:g} ms'} | {number} |")
        out += ["", f"The median is {median(widths):.1f} ms, the widest {max(widths):.1f} ms.", ""]
        out += [f"- {width:.1f} ms in {step}" for width, step in result.permitted]
    return out


def _harm(result: Result) -> list[str]:
    harm = result.harm
    out = ["## No harm", "", "| what | over the run |", "|---|---|"]
    if harm.longest_xmin_s is not None:
        out.append(
            f"| longest hold of the vacuum horizon | {harm.longest_xmin_s:.2f} s (bound {harm.xmin_bound_s:.2f} s):"
            f" {harm.longest_xmin_by.replace('|', '¦')} |"
        )
        out.append(f"| lines of the nodes in the log, in {harm.quiet_s:.0f} s at rest | {len(harm.quiet_lines)} |")
        connections = ", ".join(f"{node} {number}" for node, number in sorted(harm.connections_at_end.items()))
        out.append(f"| connections at the end | {connections} |")
    node, (per_s, during) = max(harm.asks_per_s.items(), key=lambda pair: pair[1], default=("-", (0.0, "-")))
    asks = f"{per_s:.1f} (bound {ASKS_PER_S:g}): {node}, {during}"
    out.append(f"| requests a second, of one node over {ASKS_OVER_S:g} s | {asks} |")
    grown = [last - first for first, last in harm.descriptors.values()]
    out.append(
        f"| descriptors gained, {len(grown)} processes that lived a minute and more | {max(grown, default=0)} at most |"
    )
    if harm.said:
        out += ["", "What the server's log says of the nodes' own connections, faults included:", ""]
        out += ["| line | times |", "|---|---|"]
        out += [f"| {text[:110].replace('|', '¦')} | {number} |" for text, number in harm.said.most_common(20)]
    return out


def _steps(result: Result) -> list[str]:
    out = [
        "## Every step",
        "",
        "| step | at | what, to whom | without a leader | bound | stood still |",
        "|---|---|---|---|---|---|",
    ]
    for one in result.recoveries:
        deeds = "; ".join(f"{fired.nemesis} {fired.target}".strip() for fired in one.step.fired)
        at = (one.step.since - result.history.start) / 1e9
        out.append(
            f"| {one.step.number} | {at:.0f} s | {deeds} | {one.took_s:.2f} s | {one.bound_s:.2f} s |"
            f" {one.step.stalled_s:.2f} s |"
        )
    return [*out, "", "The plan, a function of the seed:", "", "```", *result.plans, "```"]

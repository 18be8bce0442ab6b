"""A `Page` as text, 100 columns wide."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.planner.page import ActivationLine, BlockShare, Page, StepFacts, TierUse, Variant
from lohan_ds.planner.text import RESOURCES, rate_text, seconds_text, text_table

WIDTH = 100             # characters
BAR_WIDTH = 30
POLICIES = {"keep": "kept on the device", "host": "swapped to the host", "ssd": "swapped to the SSD",
            "recompute": "recomputed"}
TIME_MODEL = ("Seconds are what the busiest resource of each phase takes, without latency and without the filling and "
              "draining of pipelines.")
PLACEMENT = ("Parameters and optimizer state lie on the host or the SSD, as the runtime carries it out today; "
             "`lohan plan --device-parameters` plans with parameters that stay on the device too.")
DEVICE_PARAMETERS = "Parameters may stay on the device in this plan. The runtime does not carry that out yet."


def page_text(page: Page) -> str:
    """Ends without a newline."""
    parts = [_headline(page)]
    if page.plan is not None:
        parts += [_step(page, page.plan), _memory(page), _places(page.plan), _traffic(page.plan), _variants(page)]
    else:
        parts += [_missing(page), _memory(page)]
    notes = [*page.notes, DEVICE_PARAMETERS if page.device_parameters else PLACEMENT, TIME_MODEL]
    parts.append([line for note in notes for line in wrap(note, WIDTH)])
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(page: Page) -> list[str]:
    model, hardware = page.model, page.hardware
    trained = "" if model.num_trainable == model.num_parameters else f", {_count(model.num_trainable)} trained"
    sequences = model.micro_batch * model.accumulation
    cut = (f"micro-batch {model.micro_batch}" if model.accumulation == 1 else
           f"{model.accumulation} micro-batches of {model.micro_batch}")
    text = [f"{model.name} ({_count(model.num_parameters)} parameters{trained}, {', '.join(model.dtypes)})",
            f"on {hardware.profile['name']}" + (f": {hardware.description}" if hardware.description else ""),
            f"{cut}, {sequences} x {model.sequence_length} = {model.tokens_per_step} tokens per step; "
            + ("gradients are clipped" if page.clipping else "gradients are not clipped")]
    return [*(line for each in text for line in wrap(each, WIDTH)), "", "FITS" if page.fits else "DOES NOT FIT"]


def _step(page: Page, plan: StepFacts) -> list[str]:
    sequences = page.model.micro_batch * page.model.accumulation
    resources = [name for name in RESOURCES if any(seconds[name] for seconds in plan.work_s.values())]
    lines = [f"{seconds_text(plan.step_s)} per step, {rate_text(plan.tokens_per_s)} tokens/s "
             f"({rate_text(sequences / plan.step_s)} sequences/s); no better plan saves more than {plan.gap:.1%}",
             f"update {plan.update}, prefetch depth {plan.prefetch_depth}", ""]
    lines += text_table([("phase", "times", "each", "what binds")] +
                    [(phase.name, str(phase.count), seconds_text(phase.seconds), RESOURCES[phase.binding])
                     for phase in plan.phases if phase.seconds], "<>><")
    lines += ["", *text_table([("seconds of work", *(RESOURCES[name] for name in resources))] +
                          [(name, *(f"{seconds[resource]:.3g}" for resource in resources))
                           for name, seconds in plan.work_s.items()], "<" + ">" * len(resources))]
    return lines


def _memory(page: Page) -> list[str]:
    lines = []
    for tier in page.tiers:
        lines.append(_tier_line(tier))
        items = sorted(tier.items, key=lambda item: -item[1])
        lines += [f"  {format_bytes(nbytes):>10}  {what}" for what, nbytes in items]
    return lines


def _tier_line(tier: TierUse) -> str:
    share = tier.used_bytes / tier.budget_bytes if tier.budget_bytes else float(tier.used_bytes > 0)
    filled = round(min(share, 1) * BAR_WIDTH)
    verdict = f"MISSING {format_bytes(tier.missing_bytes)}" if tier.missing_bytes else f"{share:.0%}"
    return (f"{tier.tier:<7}{format_bytes(tier.used_bytes):>10} of {format_bytes(tier.budget_bytes):>9}  "
            f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]  {verdict}")


def _missing(page: Page) -> list[str]:
    missing = page.missing
    return [*wrap(f"missing: {missing.message}", WIDTH),
            *wrap(f"the cheapest change that would fit: {missing.change}; then {seconds_text(missing.step_s)} per "
                  f"step, {rate_text(missing.tokens_per_s)} tokens/s", WIDTH)]


def _places(plan: StepFacts) -> list[str]:
    lines = [f"{name:<20}{_shares(shares)}" for name, shares in (("parameters", plan.params),
                                                                 ("optimizer state", plan.states)) if shares]
    lines.append("saved activations")
    for policy, text in POLICIES.items():
        chosen = [line for line in plan.activations if line.policies.get(policy)]
        if chosen:
            nbytes = sum(line.nbytes[policy] for line in chosen)
            lines.append(f"  {text:<20}{format_bytes(nbytes)}")
            lines += _item_lines(chosen, policy)
    return lines


def _shares(shares: dict[str, BlockShare]) -> str:
    return ", ".join(f"{share.num_blocks} block{'s' * (share.num_blocks > 1)} on the {'SSD' if tier == 'ssd' else tier}"
                     f" ({format_bytes(share.nbytes)})" for tier, share in shares.items())


def _item_lines(chosen: Sequence[ActivationLine], policy: str) -> Iterator[str]:
    """Per class of units: each name, with how many where not all do the same."""
    for unit_class in dict.fromkeys(line.unit_class for line in chosen):
        names = []
        for line in chosen:
            if line.unit_class == unit_class:
                count, total = line.policies[policy], sum(line.policies.values())
                names.append(line.item if count == total else f"{line.item} ({count} of {total})")
        yield from wrap(f"{unit_class}: {', '.join(names)}", WIDTH, initial_indent="    ", subsequent_indent="      ")


def _traffic(plan: StepFacts) -> list[str]:
    ssd = plan.ssd
    line = (f"SSD per step: {format_bytes(ssd.read_bytes_per_step)} read, "
            f"{format_bytes(ssd.write_bytes_per_step)} written")
    if ssd.life_steps is not None:
        life = (f"; rated for {ssd.rated_write_bytes / 1e12:,.0f} TB written, the drives last {ssd.life_steps:,.0f} "
                f"steps, {ssd.life_days:,.0f} days without a break")
    else:
        life = "; drive life unknown: `lohan plan --tbw`" if ssd.write_bytes_per_step else ""
    return wrap(line + life, WIDTH)


def _variants(page: Page) -> list[str]:
    other = page.other_update
    why = "where a step is not clipped" if page.clipping else "as where gradients are clipped"
    rows = [("what if", "per step", "tokens/s", "")]
    rows += [_variant(variant, f"{variant.change}, {why}" if variant is other else variant.change)
             for variant in (other, *page.what_if)]
    return text_table(rows, "<>><")


def _variant(variant: Variant, change: str) -> tuple[str, str, str, str]:
    if variant.step_s is None:
        return change, "", "", variant.reason
    return change, seconds_text(variant.step_s), rate_text(variant.tokens_per_s), f"x {variant.factor:.2f}"


def _count(count: float) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"

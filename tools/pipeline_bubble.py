"""How much of a pipeline's time is bubble, by both definitions, when stages do not take equally long.

With p equal stages and m micro-batches the bubble is (p − 1)/m of the ideal time, or (p − 1)/(m + p − 1) of the whole.
Real stages are not equal: the first has the embedding, the last the head and the loss, and layers differ. This program
gives each stage the same number of layers, then splits the layers by time, and simulates several schedules over both.

    python tools/pipeline_bubble.py --stages 4 --microbatches 16 --layers 32 --head 2.4 --svg bubble.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ultrascale.pipeline import partition
from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.draw_svg import stacked
from ultrascale.pipeline.partition import PartitionError, Split
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import Simulation, simulate

SCHEDULES = "gpipe,1f1b,interleaved_1f1b,zb_h1,zb_v"


@dataclass(frozen=True)
class Model:
    """Times in units of a usual layer's forward; the two parts of a backward take as long each.

    layers     of each layer, in order
    embedding  of what the first stage has beside its layers
    head       of what the last one has: head and loss
    """

    layers: tuple[float, ...]
    embedding: float
    head: float

    def stage_times(self, split: Split) -> tuple[float, ...]:
        """Forward time of each stage."""
        return tuple(
            sum(self.layers[layer] for layer in stage.layers)
            + self.embedding * stage.embedding
            + self.head * stage.head
            for stage in split
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for numbers that make no pipeline."""
    args = arguments(argv)
    try:
        model = Model(layer_times(args.layers), args.embedding, args.head)
        report(model, args)
    except BrokenPipeError:  # the reader of `… | head` has seen enough
        return 0
    except (PartitionError, ScheduleError, ValueError, OSError) as error:
        print(f"pipeline_bubble: {error}", file=sys.stderr)
        return 2
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="example:\n  python tools/pipeline_bubble.py --stages 4 --microbatches 16 --layers 28,4*1.5 --head 2.4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stages", metavar="P", type=int, default=4, help="ranks of the pipeline (default: 4)")
    parser.add_argument("--microbatches", metavar="M", type=int, default=8, help="per step (default: 8)")
    parser.add_argument(
        "--layers",
        default="32",
        metavar="N[*TIME],…",
        help="layers and the time of one: 32, or 28,4*1.5 for four slow ones at the end (default: 32)",
    )
    parser.add_argument("--embedding", metavar="T", type=float, default=0.1, help="in layers (default: 0.1)")
    parser.add_argument(
        "--head", metavar="T", type=float, default=2.4, help="head and loss, in layers (default: 2.4, Llama 3 8B's)"
    )
    parser.add_argument("--p2p", metavar="T", type=float, default=0.0, help="latency of a message, in layers")
    parser.add_argument("--schedules", default=SCHEDULES, metavar="NAME,…", help=f"default: {SCHEDULES}")
    parser.add_argument("--svg", metavar="F", type=Path, help="picture of the first schedule over both splits")
    return parser.parse_args(argv)


def layer_times(text: str) -> tuple[float, ...]:
    """`28,4*1.5` as 28 ones and four times 1.5. Raises ValueError that quotes what it does not understand."""
    times: list[float] = []
    for item in text.split(","):
        count, _, time = item.partition("*")
        try:
            number, each = int(count), float(time or 1)
        except ValueError:
            raise ValueError(f"--layers {item!r} is not N or N*TIME; write for example 28,4*1.5") from None
        if number < 1 or not each > 0:
            raise ValueError(f"--layers {item!r} is nothing; give 1 or more layers and a time above 0")
        times += [each] * number
    return tuple(times)


def report(model: Model, args: argparse.Namespace) -> None:
    """Prints everything; writes the picture when one is asked for."""
    p, m = args.stages, args.microbatches
    names = [registry.find(name).name for name in args.schedules.split(",")]
    print(f"{p} equal stages, {m} micro-batches, GPipe or 1F1B:")
    print(f"  bubble over ideal time  (p − 1)/m           {(p - 1) / m:.2%}")
    print(f"  share of the whole time (p − 1)/(m + p − 1) {(p - 1) / (m + p - 1):.2%}\n")

    equal = partition.uniform(len(model.layers), p)
    print("layers by count, and the time of a forward:")
    print(table(model, equal))
    timed = by_time(model, p)
    print("\nlayers by time:")
    print(table(model, timed))

    print("\n                              time of a  |        layers by count       |         layers by time")
    print("schedule                     step, ideal |   step  of step of ideal idle |   step  of step of ideal idle")
    for name in names:
        count = registry.find(name).virtual_stages
        results = []
        for splitting in (partition.uniform(len(model.layers), p * count), by_time(model, p * count)):
            results.append(simulated(name, model, splitting, args))
        whole = 3 * m * (sum(model.layers) + model.embedding + model.head) / p
        print(f"{name:<28}{whole:>12.6g} |" + " |".join(columns(result, whole) for result in results))
    print(
        "\nof step, of ideal: what the busiest rank waits, by both definitions; idle: what all ranks wait, on average."
        "\nA slow stage waits little, since the others wait for it: its bubble looks small while the step takes longer."
    )
    if args.svg is not None:
        draw(names[0], model, args)
        print(f"wrote {args.svg}")


def table(model: Model, split: Split) -> str:
    """One line per stage; then how far the slowest is above the mean."""
    times = model.stage_times(split)
    lines = []
    for number, (stage, time) in enumerate(zip(split, times, strict=True)):
        what = f"{len(stage.layers)} layers{' + embedding' * stage.embedding}{' + head' * stage.head}"
        lines.append(f"  stage {number:>2}: {what:<26}{time:>8.4g} {'#' * round(30 * time / max(times))}")
    mean = sum(times) / len(times)
    lines.append(
        f"  slowest over mean {max(times) / mean:.3f}: every other stage waits for it, micro-batch by micro-batch"
    )
    return "\n".join(lines)


def by_time(model: Model, stages: int) -> Split:
    """The contiguous split whose slowest stage is fastest (dynamic programme over layers and stages, exact)."""
    count = len(model.layers)
    partition.uniform(count, stages)  # refuses what cannot be split
    sums = [0.0, *accumulate(model.layers)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # layers used → (slowest stage, counts)
    for stage in range(stages):
        extra = model.embedding * (stage == 0) + model.head * (stage == stages - 1)
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (slowest, counts) in best.items():
            last = count if stage == stages - 1 else used + 1
            for end in range(last, count - (stages - 1 - stage) + 1):
                candidate = (max(slowest, sums[end] - sums[used] + extra), (*counts, end - used))
                if end > used and (end not in reached or candidate < reached[end]):
                    reached[end] = candidate
        best = reached
    return partition.from_list(best[count][1], count, stages)


def simulated(name: str, model: Model, split: Split, args: argparse.Namespace) -> Simulation:
    """The schedule over the split."""
    times = model.stage_times(split)
    costs = Costs(F=times, BI=times, BW=times, P2P=args.p2p)
    return simulate(program(name, args.stages, args.microbatches, None, costs), costs)


def columns(result: Simulation, whole: float) -> str:
    """Makespan, both bubbles, idle share of all ranks."""
    idle = 1 - whole / result.makespan
    return f"{result.makespan:>7.5g} {result.bubble_fraction:>8.1%} {result.bubble_over_ideal:>8.1%} {idle:>4.0%}"


def draw(name: str, model: Model, args: argparse.Namespace) -> None:
    """Both splits below each other, on one scale."""
    count = args.stages * registry.find(name).virtual_stages
    pictures = []
    for words, split in (
        ("layers by count", partition.uniform(len(model.layers), count)),
        ("layers by time", by_time(model, count)),
    ):
        timeline = simulated(name, model, split, args).timeline()
        pictures.append(replace(timeline, title=f"{name}, {words}: {partition.to_text(split)}"))
    args.svg.write_text(stacked(pictures, f"{name} over stages that are not equal"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

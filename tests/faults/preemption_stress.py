"""By hand: loops of three processes, signalled at random times.

`PYTHONPATH=tests python tests/faults/preemption_stress.py <runs> [<seed>]`
"""

# ruff: noqa: T201 - it prints its report

from __future__ import annotations

import random
import sys
import tempfile

from support.preempted_loops import Ended, Plan, loop_case
from support.process_pool import ProcessPool

MOST_SECS = 0.6


def random_plan(root: str, rng: random.Random) -> Plan:
    signals_at = {
        rank: [rng.uniform(0, MOST_SECS) for _ in range(rng.choice([1, 1, 1, 2]))]
        for rank in rng.sample(range(3), rng.choice([1, 1, 1, 2, 3]))
    }
    slow = {rng.randrange(3): rng.choice([0.0, 0.0005, 0.003, 0.02, 0.1])}
    return Plan(
        root=root,
        signals_at=signals_at,
        step_secs=slow if rng.random() < 0.8 else dict.fromkeys(range(3), 0.001),
        save_every=rng.choice([1, 3, 10, 1_000_000]),
        blocking=rng.random() < 0.5,
        num_elements=rng.choice([1000, 300_000]),
    )


def is_sound(ended: list[Ended]) -> bool:
    return len({(one.step, one.stop_step) for one in ended}) == 1 and all(one.latest == one.step for one in ended)


def report(name: str, values: list[float]) -> None:
    values.sort()
    at = {percent: values[min(len(values) - 1, len(values) * percent // 100)] for percent in (50, 99, 100)}
    print(f"{name}: " + ", ".join(f"{percent} % within {secs * 1e3:.3f} ms" for percent, secs in at.items()))


def main() -> None:
    num_runs, seed = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    rng = random.Random(seed)  # noqa: S311 - for a run that can be repeated
    pool = ProcessPool(3)
    runs: list[list[Ended]] = []
    for number in range(num_runs):
        with tempfile.TemporaryDirectory() as root:
            plan = random_plan(root, rng)
            ended = pool.run(loop_case, plan)
        runs.append(ended)
        if not is_sound(ended):
            print(f"run {number} of seed {seed}: {plan}: {ended}")
    pool.close()
    print(f"{num_runs} runs of seed {seed}, unsound: {sum(not is_sound(ended) for ended in runs)}")
    every = [one for ended in runs for one in ended]
    report("longest check of a run", [one.longest_check_secs for one in every])
    report("boundaries held", [one.held_secs for one in every])
    report("from the signal to the end of the loop", [one.secs for one in every if one.num_signals])


if __name__ == "__main__":
    main()

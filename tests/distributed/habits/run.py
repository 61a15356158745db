"""python -m tests.distributed.habits.run [-m METHODS] [-w WAYS] [HABITS]: prints the cells that are no more than faults."""

from __future__ import annotations

import argparse
import json
import time

from tests.distributed.habits import outcomes
from tests.distributed.habits.catalogue import HABITS
from tests.distributed.habits.judge import Bench, covers, possible
from tests.distributed.habits.methods import CONTROLS, FEW, METHODS, OURS
from tests.distributed.habits.script import WAYS, find
from tests.distributed.habits.world import worlds

GROUPS = {"few": FEW, "ours": OURS, "controls": CONTROLS, "all": list(METHODS)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("habits", nargs="*")
    parser.add_argument("-m", default="few")
    parser.add_argument("-w", default="")
    parser.add_argument("-v", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write what came out into outcomes.json")
    parser.add_argument("-o", default="")
    args = parser.parse_args()
    methods = GROUPS.get(args.m) or args.m.split(",")
    ways = [w for w in WAYS if not args.w or w in args.w.split(";")]
    chosen = [h for h in HABITS if not args.habits or any(h.startswith(x) for x in args.habits)]
    began, count, results = time.time(), 0, []
    pairs = [(way, method) for way in ways for method in methods if possible(method, way)]
    with worlds() as made:
        bench = Bench(made)
        for way, method in pairs:
            kept = outcomes.read()
            for h in chosen:
                t = time.time()
                v = bench.judge(h, method, way)
                count += v.kind != "none"
                results.append((h, method, way, v.kind, v.line))
                if not v.ok or (args.v and v.kind != "none"):
                    took = f"[{time.time() - t:.1f}]"
                    print(f"{took} {way} | {method} | {h}: {v.kind.upper()} {v.line[:700]}", flush=True)
                if v.ok and covers(find(h), way):
                    outcomes.put(kept, h, way, method, v.kind)
            if args.keep:
                outcomes.write(kept)
    if args.o:
        with open(args.o, "w") as f:
            json.dump(results, f)
    print(f"{count} cells, {sum(r[3] == 'fault' for r in results)} faults, {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()

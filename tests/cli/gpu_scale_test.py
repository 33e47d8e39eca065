#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_scale_test SOURCE: tools/gpu_scale with programs that fail and hang, and tools/plot on fixed lines."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = pathlib.Path(sys.argv[1]).resolve()
SCALE, PLOT = SOURCE / "tools/gpu_scale", SOURCE / "tools/plot"
PYTHON = "/usr/bin/python3"  # the one that has the distribution's matplotlib

PROGRAM = """#!/bin/sh
echo "$@" >> "$0.calls"
case "$*" in
  info*) for name in bad good stuck last; do echo "{\\"backend\\": \\"$name\\", \\"moves_tokens\\": true}"; done
         echo '{"backend": "still", "moves_tokens": false}' ;;
  *--limits*) echo "settings: $NCCL_NVLS_ENABLE $CUDA_VISIBLE_DEVICES"; echo '{"limit": "link", "gb_per_s": 365}' ;;
  *"--backend bad"*) echo '{"backend": "bad", "num_tokens": 8}'; echo "it is broken" >&2; exit 3 ;;
  *"--backend good"*) echo '{"backend": "good", "num_tokens": 8}'; echo '{"backend": "good", "num_tokens": 512}' ;;
  *"--backend stuck"*) echo '{"backend": "stuck", "num_tokens": 8}'; sleep 60 & echo $! > "$0.child"; wait ;;
esac
"""
TESTS = """#!/bin/sh
case "$*" in
  --gtest_list_tests) echo "Rounds."; echo "  Play/2_ranks_hidden_128_0_spread_threads"
                      for i in 1 2 3; do echo "  Play/4_ranks_hidden_128_${i}_spread_threads"; done ;;
  *4_ranks*) for i in 1 2; do echo "[       OK ] Rounds.Play/4_ranks_hidden_128_${i}_spread_threads (1 ms)"; done; exit 1 ;;
  *) echo "[  SKIPPED ] Rounds.Play/2_ranks_hidden_128_0_spread_threads (0 ms)" ;;
esac
"""


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


class Scale(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.memory = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.memory.name)
        for name, text in (("tokenyard", PROGRAM), ("gpu_round_tests", TESTS)):
            (cls.folder / name).write_text(text)
            (cls.folder / name).chmod(0o755)
        cls.result = subprocess.run(
            [sys.executable, SCALE, "--gpus", "2", "--quick", "--limit", "4", "--binaries", cls.folder, "--out",
             cls.folder / "out"], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "5,6,7"})
        cls.lines = [json.loads(line) for line in (cls.folder / "out/lines.jsonl").read_text().splitlines()]
        cls.steps = {line["step"]: line for line in cls.lines if "step" in line}

    @classmethod
    def tearDownClass(cls):
        cls.memory.cleanup()

    def test_a_step_that_goes_wrong_costs_only_its_own_figures(self):
        self.assertEqual(self.result.returncode, 1, self.result.stderr)
        ends = {name: step["status"] for name, step in self.steps.items()}
        self.assertEqual(ends, {"limits": "ok", "tests_2_ranks": "no tests", "layer_2_ranks": "ok",
                                "tests_4_ranks": "failed", "layer_4_ranks": "ok", "nccl_all_gather": "failed",
                                "nccl_all_to_all": "failed", "bench_bad": "failed", "bench_good": "ok",
                                "bench_stuck": "timeout", "bench_last": "left out"})
        measured = [(line["backend"], line["num_tokens"]) for line in self.lines if "backend" in line]
        self.assertEqual(measured, [("bad", 8), ("good", 8), ("good", 512), ("stuck", 8)])

    def test_the_first_line_is_about_the_run(self):
        self.assertEqual((self.lines[0]["run"], self.lines[0]["gpus"]), ("gpu_scale", 2))

    def test_what_failed_says_why(self):
        self.assertEqual(self.steps["bench_bad"]["last_words"], ["it is broken"])
        self.assertIn("it is broken", (self.folder / "out/log.txt").read_text())
        self.assertEqual(self.steps["tests_4_ranks"]["tests"], {"passed": 2, "skipped": 0, "failed": 1})
        self.assertEqual(self.steps["tests_2_ranks"]["tests"], {"passed": 0, "skipped": 1, "failed": 0})

    def test_nothing_of_a_step_that_hangs_is_left(self):
        child = int((self.folder / "tokenyard.child").read_text())
        until = time.monotonic() + 5
        while is_running(child) and time.monotonic() < until:
            time.sleep(0.02)
        self.assertFalse(is_running(child))

    def test_multicast_is_off_and_only_so_many_devices_are_seen(self):
        self.assertIn("settings: 0 5,6", (self.folder / "out/log.txt").read_text())

    def test_a_full_run_measures_every_point(self):
        shown = subprocess.run([sys.executable, SCALE, "--gpus", "4", "--binaries", self.folder, "--dry-run"],
                               capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        for backend in ("bad", "good", "stuck", "last"):
            for dtype in ("bf16", "fp8"):
                line = next(line for line in shown if f" bench_{backend}_{dtype} " in line)
                for wanted in ("--num-ranks 4", "--num-tokens 1,8,32,128,512,1024,4096,8192", "--hidden-size 7168",
                               "--num-experts 256", "--top-k 8", "--skew uniform,zipf:1.0", "--num-sms all,8,16,32",
                               f"--dispatch-dtype {dtype}", "--graph"):
                    self.assertIn(wanted, line)
        for ranks in (4, 8):
            self.assertTrue(any(f"/(.*_)?{ranks}_ranks_.*_spread_threads" in line for line in shown))
            self.assertTrue(any(f" layer_{ranks}_ranks " in line for line in shown))


class Plot(unittest.TestCase):
    def test_pictures_of_lines_from_gpus(self):
        if subprocess.run([PYTHON, "-c", "import matplotlib"], capture_output=True, check=False).returncode != 0:
            self.skipTest("needs matplotlib")
        lines = [{"step": "limits", "status": "ok"}, {"limit": "link", "gb_per_s": 365}]
        for dtype in ("bf16", "fp8"):
            for tokens in (8, 4096):
                for num_sms in (16, 132):
                    time_us = {"median": tokens / 10 + 7, "p95": tokens / 10 + 9}
                    lines.append({"backend": "one_sided", "engine": "cuda", "device": "GPU", "num_ranks": 2, "num_sms": num_sms,
                                  "num_tokens": tokens, "dtype": "bf16", "dispatch_dtype": dtype, "skew": "uniform",
                                  "graph": True, "void": False, "pipelined_us": time_us,
                                  "link_floor_us": {"dispatch": tokens / 25, "combine": tokens / 25, "round": tokens / 12.5},
                                  "fraction_of_link_floor": {"dispatch": 0.8, "combine": 0.7, "round": 0.75}})
        lines.append({"backend": "nccl_all_gather", "engine": "cuda", "device": "GPU", "num_ranks": 2, "num_tokens": 8,
                      "dtype": "bf16", "skew": "uniform", "graph": True, "pipelined_us": {"median": 60, "p95": 61}})
        lines.append({**lines[2], "void": True})
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "lines.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            result = subprocess.run([PLOT, path, "--output", folder], capture_output=True, text=True, check=False, timeout=120)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("1 lines are left out: their run is void", result.stderr)
            for name in ("gpu_time_by_tokens_2_ranks.png", "gpu_fraction_by_sms_2_ranks.png"):
                self.assertGreater((pathlib.Path(folder) / name).stat().st_size, 10_000)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""program_test PROGRAM LAYER: what the program prints and writes, and how it refuses."""
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = sys.argv[1]
LAYER = pathlib.Path(sys.argv[2])
LIMITS = {"bf16": 4e-3, "fp8": 4e-2}
NUM_TOKENS, HIDDEN_SIZE, NUM_EXPERTS = 8192, 256, 64


def run(*arguments):
    # Longer than every deadline of the program: a hang is a failure here.
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False)


def json_lines(*arguments):
    result = run(*arguments, "--json")
    assert result.returncode == 0, f"status {result.returncode}: {result.stderr}"
    return [json.loads(line) for line in result.stdout.splitlines()]


def read_safetensors(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def tensor(path, name):
    header, data = read_safetensors(path)
    begin, end = header[name]["data_offsets"]
    return data[begin:end]

BACKENDS = ["all_gather", "high_throughput", "low_latency", "one_sided", "two_sided"]  # that move tokens


class Info(unittest.TestCase):
    def test_json_has_the_program_and_every_backend(self):
        program, *backends = json_lines("info")
        self.assertIn(program["engines"], (["host"], ["host", "cuda"]))  # as the build is
        self.assertIn(program["fabrics"], (["host"], ["host", "cuda"]))  # as the build is
        self.assertEqual([b["backend"] for b in backends], BACKENDS + ["passthrough"])
        for backend in backends:
            self.assertEqual(len(backend["contract"]), 27)
            self.assertTrue(backend["seed_class"].endswith("Manager"))
            if backend["support"] != "usable":
                self.assertNotEqual(backend["reason"], "")

    def test_people_see_every_backend(self):
        result = run("info")
        self.assertEqual(result.returncode, 0)
        for name in BACKENDS + ["passthrough", "output_layout", "grows"]:
            self.assertIn(name, result.stdout)


class Run(unittest.TestCase):
    def check_lines(self, lines, num_ranks, kind, dtype):
        for line in lines:
            self.assertEqual((line["status"], line["num_ranks"], line["rank_kind"]), ("ok", num_ranks, kind))
            self.assertEqual(line["engine"], "host")
            self.assertGreater(line["relative_error"], 0)
            self.assertLessEqual(line["relative_error"], LIMITS[dtype])
            self.assertEqual(len(line["rows_per_rank"]), num_ranks)
            for time in ("dispatch_us", "expert_us", "combine_us"):
                self.assertGreater(line[time], 0)

    def test_all_is_every_backend_that_moves_tokens(self):
        lines = json_lines("run", "--num-ranks", 3, "--num-rounds", 1)
        self.assertEqual([line["backend"] for line in lines], BACKENDS)
        self.check_lines(lines, 3, "threads", "bf16")

    def test_rows_are_those_that_the_routes_ask_for(self):
        lines = {l["backend"]: l for l in json_lines("run", "--num-ranks", 8, "--num-rounds", 1)}
        ids = struct.unpack(f"<{NUM_TOKENS * 8}q", tensor(LAYER / "tokens.safetensors", "topk_ids"))
        expected = [0] * 8
        for token in range(NUM_TOKENS):
            for owner in {i // (NUM_EXPERTS // 8) for i in ids[8 * token : 8 * token + 8]}:
                expected[owner] += 1
        self.assertEqual(lines["high_throughput"]["rows_per_rank"], expected)
        self.assertEqual(lines["one_sided"]["rows_per_rank"], expected)
        self.assertEqual(lines["all_gather"]["rows_per_rank"], [NUM_TOKENS] * 8)

    def test_names_aliases_and_processes(self):
        lines = json_lines("run", "--backend", "naive,deepep_high_throughput", "--num-ranks", 2, "--num-rounds", 1,
                           "--rank-kind", "processes", "--dispatch-dtype", "fp8")
        self.assertEqual([line["backend"] for line in lines], ["all_gather", "high_throughput"])
        self.check_lines(lines, 2, "processes", "fp8")

    def test_uneven_and_few_tokens(self):
        lines = json_lines("run", "--num-ranks", 7, "--num-rounds", 1, "--num-tokens", 33, "--num-threads", 2)
        self.check_lines(lines, 7, "threads", "bf16")
        for line in lines:
            self.assertEqual(line["num_tokens"], 7 * 33)

    def test_output_does_not_depend_on_ranks_beyond_rounding(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.safetensors"
            json_lines("run", "--backend", "one_sided", "--num-ranks", 4, "--num-rounds", 1, "--output", path)
            header, data = read_safetensors(path)
            self.assertEqual(list(header), ["combined_output"])
            self.assertEqual(header["combined_output"]["shape"], [4, 2048, HIDDEN_SIZE])
            self.assertEqual(header["combined_output"]["dtype"], "BF16")
            self.assertEqual(len(data), NUM_TOKENS * HIDDEN_SIZE * 2)
            # Compared here without the program's own arithmetic.
            wanted = struct.unpack(f"<{NUM_TOKENS * HIDDEN_SIZE}f", tensor(LAYER / "expected.safetensors", "expected_output"))
            difference = norm = 0.0
            for i in range(0, len(wanted), 17):
                value = struct.unpack("<f", b"\0\0" + data[2 * i : 2 * i + 2])[0]
                difference += (value - wanted[i]) ** 2
                norm += wanted[i] ** 2
            self.assertLessEqual((difference / norm) ** 0.5, LIMITS["bf16"])

    def test_a_wrong_expected_output_is_noticed(self):
        with tempfile.TemporaryDirectory() as folder:
            layer = pathlib.Path(folder)
            for name in ("tokens", "experts", "expected"):
                shutil.copy(LAYER / f"{name}.safetensors", layer)
            path = layer / "expected.safetensors"
            data = bytearray(path.read_bytes())
            data[-(1 << 20) :] = bytes(1 << 20)
            path.chmod(0o644)
            path.write_bytes(data)
            result = run("run", "--layer", layer, "--backend", "one_sided", "--num-ranks", 2, "--num-rounds", 1, "--json")
            self.assertEqual(result.returncode, 1)
            self.assertEqual(json.loads(result.stdout)["status"], "inaccurate")
            self.assertIn("is above 0.004", result.stderr)


class Bench(unittest.TestCase):
    SMALL = ("--num-ranks", 3, "--hidden-size", 40, "--num-experts", 12, "--top-k", 3, "--num-rounds", 3, "--warmup", 1)

    def test_every_backend_is_right_and_measured(self):
        for kind in ("threads", "processes"):
            lines = json_lines("bench", *self.SMALL, "--num-tokens", "5,9", "--rank-kind", kind, "--json")
            self.assertEqual([(line["backend"], line["num_tokens"]) for line in lines],
                             [(backend, tokens) for backend in BACKENDS for tokens in (5, 9)])
            for line in lines:
                self.assertGreater(line["round_us"]["median"], 0)
                self.assertGreaterEqual(line["round_us"]["p95"], line["round_us"]["median"])
                self.assertGreater(line["memcpy_us"], 0)
                self.assertAlmostEqual(line["ratio_memcpy"], line["round_us"]["median"] / line["memcpy_us"], places=6)

    def test_bytes_are_of_rows_that_crossed(self):
        line = json_lines("bench", *self.SMALL, "--backend", "all_gather", "--num-tokens", 5, "--json")[0]
        self.assertEqual(line["dispatch_bytes"], 3 * 2 * 5 * (40 * 2 + 3 * 8))
        self.assertEqual(line["combine_bytes"], 3 * 2 * 5 * 40 * 2)

    def test_skews_and_casts(self):
        trace = f"trace:{LAYER / 'tokens.safetensors'}"
        for skew in ("zipf:1.1", "one", trace):
            lines = json_lines("bench", "--num-ranks", 2, "--hidden-size", 40, "--num-tokens", 7, "--num-rounds", 2,
                               "--skew", skew, "--backend", "low_latency,two_sided", "--dispatch-dtype", "fp8", "--json")
            self.assertEqual([line["dispatch_dtype"] for line in lines], ["fp8", "fp8"])

    def test_lists_are_measured_one_by_one(self):
        lines = json_lines("bench", *self.SMALL, "--backend", "one_sided,high_throughput", "--num-tokens", 5,
                           "--dispatch-dtype", "bf16,fp8", "--skew", "uniform,one")
        self.assertEqual([(line["backend"], line["dispatch_dtype"], line["skew"]) for line in lines],
                         [(backend, dtype, skew) for backend in ("one_sided", "high_throughput")
                          for dtype in ("bf16", "fp8") for skew in ("uniform", "one")])
        # Expert 0 has every token, so rank 1 and rank 2 send all of theirs to rank 0: 40 codes and one scale a row.
        bf16, fp8 = (line for line in lines[:4] if line["skew"] == "one")
        self.assertEqual(bf16["dispatch_bytes"] // (40 * 2 + 3 * 8), fp8["dispatch_bytes"] // (40 + 4 + 3 * 8))
        self.assertEqual(fp8["dispatch_bytes"] % (40 + 4 + 3 * 8), 0)
        self.assertEqual(fp8["combine_bytes"], bf16["combine_bytes"])

    def test_wrong_options_are_refused(self):
        for wrong, word in ((("--dispatch-dtype", "f32"), "f32"), (("--skew", "even"), "even"), (("--skew", "zipf:x"), "zipf"),
                            (("--num-experts", 12, "--top-k", 13), "13"), (("--num-tokens", 0), "num-tokens"),
                            (("--skew", "trace:/nowhere"), "/nowhere"), (("--dtype", "fp4"), "fp4")):
            result = run("bench", "--backend", "one_sided", "--num-rounds", 1, *wrong)
            self.assertNotEqual(result.returncode, 0, wrong)
            self.assertIn(word, result.stderr + result.stdout, wrong)


class Cuda(unittest.TestCase):
    NO_BUILD = "built without CUDA: --engine cuda needs one configured with TOKENYARD_CUDA=ON"
    NO_DEVICE = "--engine cuda cannot be used here: "

    @classmethod
    def setUpClass(cls):
        cls.built = "cuda" in json_lines("info")[0]["engines"]
        probe = run("run", "--engine", "cuda", "--backend", "one_sided", "--num-ranks", 1, "--num-tokens", 8,
                    "--num-rounds", 1)
        cls.usable = cls.built and cls.NO_DEVICE not in probe.stderr

    def need_device(self):
        if not self.usable:
            self.skipTest("needs a build with CUDA and a GPU")

    def test_without_cuda_the_engine_is_refused(self):
        if self.usable:
            self.skipTest("there is a GPU")
        for command in (("run",), ("run", "--json", "--rank-kind", "processes"), ("bench",), ("bench", "--graph"),
                        ("bench", "--limits")):
            result = run(*command, "--engine", "cuda")
            self.assertEqual(result.returncode, 1)
            self.assertEqual(result.stdout, "")
            self.assertIn(self.NO_DEVICE if self.built else self.NO_BUILD, result.stderr)

    def test_devices_are_for_cuda(self):
        for wrong in (("run", "--device", 0), ("run", "--num-devices", 1), ("run", "--mapped-host"), ("bench", "--device", 0),
                      ("bench", "--graph"), ("bench", "--eager"), ("bench", "--num-sms", 4)):
            result = run(*wrong)
            self.assertEqual(result.returncode, 1)
            self.assertIn("are for --engine cuda", result.stderr)

    def test_run_gives_the_expected_output(self):
        self.need_device()
        for kind in ("threads", "processes"):
            for dtype in ("bf16", "fp8"):
                lines = json_lines("run", "--engine", "cuda", "--num-ranks", 3, "--rank-kind", kind, "--num-rounds", 2,
                                   "--dispatch-dtype", dtype, "--num-tokens", 500)
                self.assertEqual([line["backend"] for line in lines], BACKENDS)
                for line in lines:
                    self.assertEqual(line["engine"], "cuda")
                    self.assertNotEqual(line["device"], "")
                    if line["status"] == "unusable":
                        self.assertNotEqual(line["reason"], "")
                        continue
                    self.assertEqual(line["status"], "ok")
                    self.assertLessEqual(line["relative_error"], LIMITS[dtype])
                    self.assertGreater(line["dispatch_us"], 0)
                self.assertIn("ok", [line["status"] for line in lines if line["backend"] == "one_sided"])

    def test_bench_is_right_and_measured(self):
        self.need_device()
        for more in ((), ("--graph",), ("--graph", "--num-sms", 2), ("--rank-kind", "processes")):
            lines = json_lines("bench", "--engine", "cuda", "--backend", "one_sided", *Bench.SMALL, "--num-tokens", "5,9",
                               *more)
            self.assertEqual([line["num_tokens"] for line in lines], [5, 9])
            for line in lines:
                self.assertEqual((line["engine"], line["graph"]), ("cuda", "--graph" in more))
                self.check_link(line)
                self.assertEqual("pipelined_us" in line, line["graph"])
                for time in ("dispatch_us", "combine_us", "round_us"):
                    self.assertGreater(line[time]["median"], 0)
                if len(line["devices"]) == 1:
                    self.assertEqual(line["dispatch_bytes_per_direction"], 0)

    def check_link(self, line):
        if len(line["devices"]) == 1 or line["link"] == "no link":
            self.assertEqual((line["void"], line["fraction_of_link_floor"]), (False, None))
            return
        self.assertEqual(line["void"], line["link_gb_per_s"] < 350)
        for phase in ("dispatch", "combine"):
            floor = line[f"{phase}_bytes_per_direction"] / line["link_gb_per_s"] / 1e3
            self.assertAlmostEqual(line["fraction_of_link_floor"][phase], floor / line[f"{phase}_us"]["median"], places=6)

    def test_lists_are_measured_one_by_one(self):
        self.need_device()
        lines = json_lines("bench", "--engine", "cuda", "--backend", "one_sided", *Bench.SMALL, "--num-tokens", 6,
                           "--num-sms", "1,auto,all", "--graph", "--eager", "--dispatch-dtype", "bf16,fp8",
                           "--skew", "uniform,zipf:1.0")
        most = lines[2]["num_sms"]
        self.assertGreater(most, 1)
        self.assertEqual([(line["dispatch_dtype"], line["skew"], line["graph"], line["num_sms"]) for line in lines],
                         [(dtype, skew, graph, num_sms) for dtype in ("bf16", "fp8") for skew in ("uniform", "zipf:1.0")
                          for graph in (False, True) for num_sms in (1, 0, most)])

    def test_limits_are_measured(self):
        self.need_device()
        lines = {(line["limit"], line.get("blocks")): line for line in json_lines("bench", "--limits", "--num-devices", 1)}
        self.assertGreater(lines["empty_kernel", None]["us"], 0)
        self.assertEqual((lines["link", None]["link"], lines["link", None]["void"]), ("no link", False))
        self.assertNotEqual(lines["link", None]["reason"], "")
        lines = {(line["limit"], line.get("blocks")): line for line in json_lines("bench", "--limits")
                 if len(line["devices"]) <= 2}
        for blocks in (8, 16, 32, 48, 132):
            self.assertGreater(lines["local_copy", blocks]["gb_per_s"], 0)
        if lines["link", None]["link"] == "no link":
            self.skipTest("nothing of a link: needs two GPUs that reach each other")
        for name in ("peer_stores", "peer_bulk_stores", "peer_loads"):
            for blocks in (8, 16, 32, 48, 132):
                self.assertEqual(len(lines[name, blocks]["gb_per_s_of_each"]), 2)
        best = max(line["gb_per_s"] for (name, _), line in lines.items() if name in ("peer_stores", "peer_bulk_stores"))
        self.assertEqual(lines["link", None]["gb_per_s"], best)
        self.assertEqual(lines["link", None]["void"], best < 350)
        self.assertGreater(lines["pair_barrier", None]["us"], lines["empty_kernel", None]["us"])
        self.assertGreater(lines["flag_one_way", None]["us"], 0)

    def test_a_backend_that_the_engine_lacks_is_unusable_by_name(self):
        self.need_device()
        result = run("run", "--engine", "cuda", "--backend", "two_sided", "--num-ranks", 2, "--num-rounds", 1, "--json")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(json.loads(result.stdout)["status"], "unusable")

    def test_devices_that_are_not_there(self):
        self.need_device()
        self.assertIn("this machine has", run("run", "--engine", "cuda", "--device", 99).stderr)
        self.assertIn("this machine has", run("run", "--engine", "cuda", "--num-devices", 99).stderr)


class Refusals(unittest.TestCase):
    def check_refused(self, arguments, *words):
        result = run(*arguments)
        self.assertNotEqual(result.returncode, 0)
        self.assertLess(result.returncode, 128, "ended by a signal")
        for word in words:
            self.assertIn(word, result.stderr + result.stdout)

    def test_passthrough_says_why(self):
        result = run("run", "--backend", "passthrough", "--json")
        self.assertEqual(result.returncode, 1)
        line = json.loads(result.stdout)
        self.assertEqual(line["status"], "unusable")
        self.assertNotEqual(line["reason"], "")
        self.assertIn(line["reason"], result.stderr)

    def test_unknown_names_and_values(self):
        self.check_refused(["run", "--backend", "nosuch"], "nosuch", "one_sided")
        self.check_refused(["run", "--num-ranks", "0"], "--num-ranks")
        self.check_refused(["run", "--rank-kind", "fibres"], "--rank-kind")
        self.check_refused([], "subcommand")

    def test_a_layer_that_is_cut_short(self):
        with tempfile.TemporaryDirectory() as folder:
            layer = pathlib.Path(folder)
            for name in ("experts", "expected"):
                shutil.copy(LAYER / f"{name}.safetensors", layer)
            self.check_refused(["run", "--layer", layer], "tokens.safetensors", "cannot be read")
            (layer / "tokens.safetensors").write_bytes((LAYER / "tokens.safetensors").read_bytes()[:100000])
            self.check_refused(["run", "--layer", layer], "tokens.safetensors")

    def test_a_rank_that_fails_ends_the_run(self):
        # An id beyond the experts: the rank that holds the token throws, and every kind of rank comes to an end.
        with tempfile.TemporaryDirectory() as folder:
            layer = pathlib.Path(folder)
            for name in ("tokens", "experts", "expected"):
                shutil.copy(LAYER / f"{name}.safetensors", layer)
            path = layer / "tokens.safetensors"
            header, data = read_safetensors(path)
            begin = len(path.read_bytes()) - len(data) + header["topk_ids"]["data_offsets"][0]
            data = bytearray(path.read_bytes())
            data[begin : begin + 8] = struct.pack("<q", 1000)
            path.chmod(0o644)
            path.write_bytes(data)
            for kind in ("threads", "processes"):
                result = run("run", "--layer", layer, "--backend", "high_throughput", "--num-ranks", 3, "--rank-kind", kind,
                             "--num-rounds", 1)
                self.assertEqual(result.returncode, 1, kind)
                self.assertIn("failed: rank 0", result.stderr)
                self.assertIn("1000", result.stderr)

    def test_a_rank_that_is_killed_is_named(self):
        command = [PROGRAM, "run", "--backend", "one_sided", "--num-ranks", "3", "--rank-kind", "processes",
                   "--num-rounds", "10000"]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        children = pathlib.Path(f"/proc/{program.pid}/task/{program.pid}/children")
        try:
            deadline = time.monotonic() + 60
            while len(children.read_text().split()) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
            _, errors = program.communicate(timeout=60)
            self.assertEqual(program.returncode, 1)
            self.assertIn("rank 1: ended by signal 9", errors)
        finally:
            program.kill()
            program.wait()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)

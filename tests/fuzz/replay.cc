// SPDX-License-Identifier: Apache-2.0
// A fuzz target without libFuzzer: runs the kept corpus, then deterministic mutations of it.
//
//   fuzz_NAME FILE_OR_FOLDER...                            runs these inputs
//   fuzz_NAME --mutations N --seed S FILE_OR_FOLDER...     and N mutations of them
//
// The input that fails is written to fuzz_NAME.failed in the current folder; give that file to run it alone.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/target.h"
#include "support/rng.h"

// Of the address sanitizer's run-time library, where there is one.
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(void (*callback)());  // NOLINT: the name is not ours

namespace {

using Bytes = std::vector<std::byte>;
using tokenyard::support::Rng;

constexpr std::size_t kMaxBytes = 4096;

// What the handlers below need, set before they can run.
Bytes current;
std::string failed_path;
std::string where;  // what is printed about it

// Only calls that a signal handler may make. What cannot be written is lost: the program ends anyhow.
void write_current() {
  const int file = open(failed_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return;
  const bool written = write(file, current.data(), current.size()) == static_cast<ssize_t>(current.size());
  close(file);
  if (written) (void)!write(STDERR_FILENO, where.data(), where.size());
}

void on_signal(int number) {
  write_current();
  (void)std::signal(number, SIG_DFL);
  (void)raise(number);
}

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Files in the order of their names, so that every run is the same.
std::vector<Bytes> read_all(const std::vector<std::string>& arguments) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& argument : arguments) {
    if (!std::filesystem::is_directory(argument)) {
      paths.emplace_back(argument);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argument))
      paths.push_back(entry.path());
  }
  std::ranges::sort(paths);
  std::vector<Bytes> inputs;
  for (const auto& path : paths)
    inputs.push_back(read_file(path));
  return inputs;
}

std::size_t below(Rng& rng, std::size_t bound) {
  return static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(bound)));
}

// Replaces up to eight bytes by a number next to a limit, or by any.
void put_number(Rng& rng, Bytes& bytes) {
  constexpr std::array<std::uint64_t, 8> kNumbers{
      0, 1, 0x7F, 0xFF, 0x7FFF'FFFF, 0xFFFF'FFFF, 0x7FFF'FFFF'FFFF'FFFF, 0xFFFF'FFFF'FFFF'FFFF};
  const std::uint64_t number = rng.below(2) == 0 ? rng.next() : kNumbers[below(rng, kNumbers.size())];
  const std::size_t at = below(rng, bytes.size());
  const std::size_t width = std::min(std::size_t{1} << below(rng, 4), bytes.size() - at);
  for (std::size_t i = 0; i < width; ++i)
    bytes[at + i] = static_cast<std::byte>((number >> (8 * i)) & 0xFF);
}

void mutate_once(Rng& rng, const std::vector<Bytes>& inputs, Bytes& bytes) {
  if (bytes.empty()) bytes.push_back(static_cast<std::byte>(rng.next() & 0xFF));
  const std::size_t at = below(rng, bytes.size());
  const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
  switch (rng.below(7)) {
    case 0:
      bytes[at] ^= static_cast<std::byte>(1U << below(rng, 8));
      return;
    case 1:
      bytes[at] = static_cast<std::byte>(rng.next() & 0xFF);
      return;
    case 2:
      put_number(rng, bytes);
      return;
    case 3:
      bytes.insert(place, 1 + below(rng, 8), static_cast<std::byte>(rng.next() & 0xFF));
      return;
    case 4:
      bytes.erase(place, place + static_cast<std::ptrdiff_t>(1 + below(rng, bytes.size() - at)));
      return;
    case 5: {  // the head of this one and the tail of another
      const Bytes& other = inputs[below(rng, inputs.size())];
      const std::size_t from = other.empty() ? 0 : below(rng, other.size());
      bytes.resize(at);
      bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
      return;
    }
    default:
      while (bytes.size() < at + 64)
        bytes.push_back(static_cast<std::byte>(rng.next() & 0xFF));
  }
}

Bytes mutated(Rng& rng, const std::vector<Bytes>& inputs) {
  Bytes bytes = inputs[below(rng, inputs.size())];
  for (std::size_t left = 1 + below(rng, 6); left > 0; --left)
    mutate_once(rng, inputs, bytes);
  if (bytes.size() > kMaxBytes) bytes.resize(kMaxBytes);
  return bytes;
}

bool run_one(const std::string& what, Bytes bytes) {
  // A vector of exactly this size: reads past the end are seen by the address sanitizer.
  current = std::move(bytes);
  current.shrink_to_fit();
  try {
    return LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size()) == 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", what.c_str(), error.what());
    write_current();
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  long mutations = 0;
  std::uint64_t seed = 1;
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--mutations" && i + 1 < argc) {
      mutations = std::stol(argv[++i]);
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else {
      arguments.push_back(argument);
    }
  }
  failed_path = std::filesystem::path(argv[0]).filename().string() + ".failed";
  where = "the input that failed is in " + failed_path + "\n";
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL})
    (void)std::signal(number, on_signal);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(write_current);

  const std::vector<Bytes> inputs = read_all(arguments);
  if (inputs.empty()) {
    std::fprintf(stderr, "no inputs in %s\n", arguments.empty() ? "(nothing given)" : arguments.front().c_str());
    return 2;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!run_one("input " + std::to_string(i), inputs[i])) return 1;
  }
  Rng rng(seed);
  for (long i = 0; i < mutations; ++i) {
    if (!run_one("mutation " + std::to_string(i) + " of seed " + std::to_string(seed), mutated(rng, inputs))) return 1;
  }
  std::printf("%zu inputs and %ld mutations: all properties held\n", inputs.size(), mutations);
  return 0;
}

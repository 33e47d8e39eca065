// SPDX-License-Identifier: Apache-2.0
#include "steady/system_call_watch.h"

#include <seccomp.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
#include <stdexcept>

namespace tokenyard::steady_tests {
namespace {

constexpr int kFromSeccomp = 1;  // SYS_SECCOMP of linux/signal.h, which glibc's headers exclude

// One watch a process: a signal handler has no argument of its own.
std::atomic<SystemCallWatch::Record*> watched{nullptr};

void write_down(int /*signal*/, siginfo_t* info, void* /*context*/) {
  SystemCallWatch::Record* record = watched.load();
  if (record == nullptr || info->si_code != kFromSeccomp) std::_Exit(EXIT_FAILURE);
  if (record->num_calls.fetch_add(1) == 0) record->first_call = info->si_syscall;
}

void check(int result, const char* what) {
  if (result < 0) throw std::runtime_error(std::string(what) + ": " + std::strerror(-result));
}

// What waiting is made of, and what the end of a process and of the handler needs.
constexpr std::initializer_list<int> kAllowed{
    SCMP_SYS(sched_yield),   SCMP_SYS(clock_nanosleep), SCMP_SYS(nanosleep),       SCMP_SYS(futex),
    SCMP_SYS(clock_gettime), SCMP_SYS(rt_sigreturn),    SCMP_SYS(restart_syscall), SCMP_SYS(exit_group)};

}  // namespace

SystemCallWatch::Record& SystemCallWatch::make_record() {
  void* memory = ::mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return *new (memory) Record;
}

void SystemCallWatch::begin(Record& record, Scope scope) {
  watched = &record;
  struct sigaction action = {};
  action.sa_sigaction = write_down;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (::sigaction(SIGSYS, &action, nullptr) != 0) throw std::runtime_error("sigaction(SIGSYS) failed");
  scmp_filter_ctx filter = seccomp_init(SCMP_ACT_TRAP);
  if (filter == nullptr) throw std::bad_alloc();
  if (scope == Scope::kAllThreads) check(seccomp_attr_set(filter, SCMP_FLTATR_CTL_TSYNC, 1), "SCMP_FLTATR_CTL_TSYNC");
  for (const int call : kAllowed)
    check(seccomp_rule_add(filter, SCMP_ACT_ALLOW, call, 0), "seccomp_rule_add");
  check(seccomp_load(filter), "seccomp_load");
  // The filter's description is left alone: freeing it could ask the system for something.
}

bool SystemCallWatch::permitted(std::string& reason) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      begin(make_record(), Scope::kAllThreads);
    } catch (const std::exception&) {
      ::_exit(EXIT_FAILURE);
    }
    ::_exit(EXIT_SUCCESS);
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  if (WIFEXITED(state) && WEXITSTATUS(state) == EXIT_SUCCESS) return true;
  reason = "this system lets no process install a seccomp filter (child's wait status " + std::to_string(state) + ")";
  return false;
}

std::string SystemCallWatch::name_of(int call) {
  char* text = seccomp_syscall_resolve_num_arch(SCMP_ARCH_NATIVE, call);
  std::string result = text == nullptr ? "" : text;
  std::free(text);  // libseccomp gives it away
  return result + " (" + std::to_string(call) + ")";
}

}  // namespace tokenyard::steady_tests

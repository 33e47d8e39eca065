// SPDX-License-Identifier: Apache-2.0
// Only the interfaces of the header can be asked for; anything else is found out when the program is linked.
#include "tokenyard/tokenyard.h"

namespace {

bool has_interface(tokenyard::Communication& communication) {
#ifdef BAD
  return communication.get<int>() != nullptr;
#else
  return communication.get<tokenyard::SplitPhases>() != nullptr;
#endif
}

}  // namespace

int main(int argc, char**) {
  if (argc < 2) return 0;  // never run: only linked
  auto groups = tokenyard::Group::in_process(1);
  auto communication = tokenyard::create_communication(groups[0], {}, "one_sided");
  return has_interface(communication) ? 0 : 1;
}

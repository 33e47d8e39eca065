// SPDX-License-Identifier: Apache-2.0
// Whether this build makes plain stores where it would stream: the thread sanitizer does not see streaming stores.
// Thread rule: a constant.
#pragma once

namespace tokenyard::engine::host {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kPlainStores = true;
#elif defined(__has_feature)
  #if __has_feature(thread_sanitizer)
inline constexpr bool kPlainStores = true;
  #else
inline constexpr bool kPlainStores = false;
  #endif
#else
inline constexpr bool kPlainStores = false;
#endif

}  // namespace tokenyard::engine::host

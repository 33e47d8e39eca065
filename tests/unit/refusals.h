// SPDX-License-Identifier: Apache-2.0
// Calls that must throw kInvalidArgument with a message that says why.
// Thread rule: gtest's.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tokenyard/error.h"

namespace tokenyard {

inline void expect_refused(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "accepted, expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

}  // namespace tokenyard

// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "system/process.h"
#include "system/segment.h"
#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using system::FileDescriptor;
using system::Segment;
using namespace testing_groups;

FileDescriptor copy_of(int fd) {
  return FileDescriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

TEST(SystemSegment, IsZeroedAndPageAligned) {
  const Segment segment = Segment::create(100'001);
  EXPECT_EQ(segment.bytes(), 100'001);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment.data()) % 4096, 0U);
  EXPECT_TRUE(
      std::all_of(segment.data(), segment.data() + segment.bytes(), [](std::byte b) { return b == std::byte{}; }));
  EXPECT_NE(::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SystemSegment, AnImportSeesTheSameMemoryAndOutlivesTheOwner) {
  Segment import;
  {
    const Segment owner = Segment::create(5000);
    import = Segment::import(copy_of(owner.fd()), 5000);
    EXPECT_NE(import.data(), owner.data());
    owner.data()[4999] = std::byte{42};
  }
  EXPECT_EQ(import.data()[4999], std::byte{42});
}

TEST(SystemSegment, MovesLeaveNothingBehind) {
  Segment first = Segment::create(10);
  std::byte* const data = first.data();
  Segment second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): that is what is tested
  second = Segment::create(20);
  EXPECT_EQ(second.bytes(), 20);
}

TEST(SystemSegment, RefusesSizesThatAreNone) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}}) {
    expect_error(ErrorCode::kInvalidArgument, {std::to_string(bytes)}, [&] { (void)Segment::create(bytes); });
  }
}

TEST(SystemSegment, MoreThanTheMachineHasIsAnErrorWithTheSize) {
  expect_error(ErrorCode::kSystem, {"9223372036854775807", "errno 12"},
               [] { (void)Segment::create(std::numeric_limits<std::int64_t>::max()); });
}

// The pages are reserved at creation, so a limit shows there and not when they are touched.
TEST(SystemSegment, AFailedReservationIsAnErrorWithTheReason) {
  Child child([] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 65536, .rlim_max = 65536};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    const std::optional<Error> error = error_of([] { (void)Segment::create(1 << 20); });
    const std::string text = error ? error->what() : "";
    return error && error->code() == ErrorCode::kSystem && text.find("1048576") != std::string::npos &&
           text.find("errno 27") != std::string::npos;
  });
  EXPECT_TRUE(child.wait());
}

TEST(SystemSegment, RefusesToImportLessThanIsNeeded) {
  const Segment owner = Segment::create(4096);
  expect_error(ErrorCode::kMismatch, {"4096", "4097"}, [&] { (void)Segment::import(copy_of(owner.fd()), 4097); });
}

TEST(SystemSegment, RefusesToImportWhatItsOwnerCouldShrink) {
  FileDescriptor fd(::memfd_create("shrinkable", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 4096), 0);
  expect_error(ErrorCode::kMismatch, {"sealed"}, [&] { (void)Segment::import(std::move(fd), 4096); });
}

TEST(SystemSegment, ItsSizeIsSealed) {
  const Segment segment = Segment::create(8192);
  EXPECT_NE(::ftruncate(segment.fd(), 4096), 0);
  EXPECT_NE(::ftruncate(segment.fd(), 16384), 0);
}

TEST(SystemProcess, TheNonceTellsProcessesApartRightAfterFork) {
  const std::uint64_t own = system::process_nonce();
  std::uint64_t on_thread = 0;
  std::thread([&] { on_thread = system::process_nonce(); }).join();
  EXPECT_EQ(own, on_thread);
  Child child([own] {
    const std::uint64_t first = system::process_nonce();
    return first != own && system::process_nonce() == first;
  });
  EXPECT_TRUE(child.wait());
}

}  // namespace

}  // namespace tokenyard

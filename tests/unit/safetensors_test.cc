// SPDX-License-Identifier: Apache-2.0
// The safetensors reader refuses every kind of lying or damaged file, naming it and what is wrong.
#include "cli/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tokenyard/error.h"

namespace tokenyard::cli {
namespace {

std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes) {
  std::vector<std::byte> file(8 + header.size() + data_bytes);
  const std::uint64_t length = header.size();
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + 8, header.data(), header.size());
  for (std::size_t i = 0; i < data_bytes; ++i)
    file[8 + header.size() + i] = static_cast<std::byte>(i);
  return file;
}

// Expects a refusal whose message holds the file's label and `reason`.
void expect_refused(const std::vector<std::byte>& file, const std::string& reason) {
  try {
    (void)Safetensors::parse(file, "layer.safetensors");
    ADD_FAILURE() << "accepted, expected: " << reason;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    const std::string message = error.what();
    EXPECT_NE(message.find("layer.safetensors"), std::string::npos) << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
  }
}

void expect_header_refused(const std::string& header, std::size_t data_bytes, const std::string& reason) {
  SCOPED_TRACE(header);
  expect_refused(file_of(header, data_bytes), reason);
}

constexpr const char* kTwoTensors = R"({"__metadata__":{"k":"v"},)"
                                    R"("a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                                    R"("b":{"dtype":"F32","shape":[1,2],"data_offsets":[3,11]}})";

TEST(Safetensors, ReadsWhatIsThere) {
  const auto file = Safetensors::parse(file_of(kTwoTensors, 11), "x");
  ASSERT_EQ(file.tensors().size(), 2u);
  const StoredTensor& a = file.at("a");
  EXPECT_EQ(a.dtype, Dtype::kU8);
  EXPECT_EQ(a.shape, std::vector<std::int64_t>{3});
  EXPECT_EQ(a.bytes, (std::vector{std::byte{0}, std::byte{1}, std::byte{2}}));
  // Its bytes lie at an odd place of the file, and are aligned in memory all the same.
  const TensorView b = file.at("b").view();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data) % alignof(float), 0u);
  EXPECT_EQ(b.describe(), "f32[1, 2]");
  EXPECT_EQ(*b.as<const std::uint8_t>(), 3);
}

TEST(Safetensors, AskingForAnotherTensorNamesThoseThere) {
  const auto file = Safetensors::parse(file_of(kTwoTensors, 11), "x.safetensors");
  try {
    (void)file.at("c");
    FAIL() << "there is no c";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "x.safetensors: has no tensor \"c\"; it has a, b");
  }
}

TEST(Safetensors, RefusesEveryCut) {
  const auto whole = file_of(kTwoTensors, 11);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    const std::vector<std::byte> cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW((void)Safetensors::parse(cut, "x"), Error);
  }
  expect_refused({whole.begin(), whole.begin() + 7}, "7 bytes long");
  expect_refused({whole.begin(), whole.begin() + 40}, "cut short");
}

TEST(Safetensors, RefusesLyingHeaderLengths) {
  auto file = file_of(kTwoTensors, 11);
  for (const std::uint64_t length : {kMaxSafetensorsHeaderBytes + 1, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    std::memcpy(file.data(), &length, sizeof length);
    expect_refused(file, "at most 100000000");
  }
  const std::uint64_t one_too_many = file.size() - 7;
  std::memcpy(file.data(), &one_too_many, sizeof one_too_many);
  expect_refused(file, "cut short");
}

TEST(Safetensors, RefusesHeadersThatAreNoJson) {
  expect_header_refused("", 0, "not valid JSON");
  expect_header_refused("{\"a\":", 0, "not valid JSON");
  expect_header_refused("{} {}", 0, "not valid JSON");
  expect_header_refused("\"\xff\"", 0, "not valid JSON");
  expect_header_refused("[]", 0, "not a JSON object");
  expect_header_refused(std::string(10'000, '['), 0, "nested deeper");
}

TEST(Safetensors, RefusesKeysGivenTwice) {
  expect_header_refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                        R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                        1, "\"a\" twice");
  expect_header_refused(R"({"a":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1]}})", 1, "\"dtype\" twice");
  // The same key in two tensors is no repetition.
  EXPECT_NO_THROW((void)Safetensors::parse(file_of(kTwoTensors, 11), "x"));
}

TEST(Safetensors, RefusesDtypesItDoesNotKnow) {
  expect_header_refused(R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}})", 8, "dtype \"F64\"");
  expect_header_refused(R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,8]}})", 8, "no string");
}

TEST(Safetensors, RefusesMissingOrMisshapenFields) {
  expect_header_refused(R"({"a":3})", 0, "not described by an object");
  expect_header_refused(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "no \"dtype\"");
  expect_header_refused(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "no \"shape\"");
  expect_header_refused(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "no \"data_offsets\"");
  for (const char* shape : {"[-1]", "[1.0]", "[\"1\"]", "1", "[[1]]"}) {
    expect_header_refused(R"({"a":{"dtype":"U8","shape":)" + std::string(shape) + R"(,"data_offsets":[0,1]}})", 1, "");
  }
}

TEST(Safetensors, RefusesOffsetsThatDoNotFit) {
  const auto with_offsets = [](const std::string& offsets) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + offsets + "}}";
  };
  EXPECT_NO_THROW((void)Safetensors::parse(file_of(with_offsets("[0,4]"), 4), "x"));
  expect_header_refused(with_offsets("[0,5]"), 4, "up to 4");
  expect_header_refused(with_offsets("[4,0]"), 4, "two rising numbers");
  expect_header_refused(with_offsets("[0]"), 4, "two rising numbers");
  expect_header_refused(with_offsets("[0,4,4]"), 4, "two rising numbers");
  expect_header_refused(with_offsets("[0,18446744073709551615]"), 4, "up to 4");
  expect_header_refused(with_offsets("[0,3]"), 4, "is 4 bytes, and data_offsets that span 3");
  expect_header_refused(with_offsets("[0,4]"), 5, "bytes 4 to 5 belong to no tensor");
  expect_header_refused(with_offsets("[1,5]"), 5, "bytes 0 to 1 belong to no tensor");
}

TEST(Safetensors, RefusesOverlaps) {
  expect_header_refused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                        R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                        4, "\"b\" overlaps");
}

TEST(Safetensors, RefusesShapesThatOverflow) {
  for (const char* shape :
       {"[4294967296,4294967296]", "[9223372036854775808]", "[2305843009213693952,4]", "[0,4294967296,4294967296]"}) {
    expect_header_refused(R"({"a":{"dtype":"F32","shape":)" + std::string(shape) + R"(,"data_offsets":[0,0]}})", 0,
                          "too large");
  }
  // A product that is 0 modulo 2^64 must not pass for an empty tensor, nor an empty one for a mistake.
  EXPECT_NO_THROW(
      (void)Safetensors::parse(file_of(R"({"a":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]}})", 0), "x"));
}

class SafetensorsFile : public ::testing::Test {
 protected:
  SafetensorsFile()
      : path_(std::filesystem::temp_directory_path() / ("tokenyard_" + std::to_string(getpid()) + ".safetensors")) {}

  ~SafetensorsFile() override { std::filesystem::remove(path_); }

  std::filesystem::path path_;
};

TEST_F(SafetensorsFile, ReadsWhatItWrote) {
  std::vector<std::uint16_t> rows{1, 2, 3, 4, 5, 6};
  std::vector<std::int64_t> ids{-1, 7};
  const std::vector<NamedTensor> tensors{{"rows", {rows.data(), Dtype::kBf16, {3, 1, 2}}},
                                         {"ids", {ids.data(), Dtype::kI64, {2}}},
                                         {"none", {nullptr, Dtype::kF32, {0, 4}}}};
  write_safetensors(path_, tensors);
  const auto file = Safetensors::load(path_);
  EXPECT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.at("rows").shape, (std::vector<std::int64_t>{3, 1, 2}));
  EXPECT_EQ(std::memcmp(file.at("rows").bytes.data(), rows.data(), 12), 0);
  EXPECT_EQ(std::memcmp(file.at("ids").bytes.data(), ids.data(), 16), 0);
  EXPECT_TRUE(file.at("none").bytes.empty());

  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 1);
  EXPECT_THROW((void)Safetensors::load(path_), Error);
}

TEST_F(SafetensorsFile, WriterRefusesWhatItCannotWrite) {
  std::vector<float> values(8);
  TensorView strided(values.data(), Dtype::kF32, {2, 2});
  strided.strides[0] = 4;
  const TensorView whole(values.data(), Dtype::kF32, {2, 2});
  EXPECT_THROW(write_safetensors(path_, std::vector<NamedTensor>{{"a", strided}}), Error);
  EXPECT_THROW(write_safetensors(path_, std::vector<NamedTensor>{{"a", whole}, {"a", whole}}), Error);
  EXPECT_THROW(write_safetensors(path_ / "no_such_folder" / "x", std::vector<NamedTensor>{{"a", whole}}), Error);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST(Safetensors, AFileThatIsNotThereIsNamed) {
  try {
    (void)Safetensors::load("no_such_folder/tokens.safetensors");
    FAIL() << "there is no such file";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no_such_folder/tokens.safetensors"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tokenyard::cli

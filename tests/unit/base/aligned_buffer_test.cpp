// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/aligned_buffer.h"

#include <cstring>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

bool aligned(const void* data, Bytes alignment) {
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

TEST(AlignedBuffer, IsAlignedAndWritable) {
  for (const Bytes alignment : {Bytes{1}, Bytes{64}, 4_KiB, 2_MiB}) {
    for (const Bytes size : {Bytes{1}, Bytes{4095}, 4_KiB, 3_MiB + 5}) {
      for (const auto pages : {AlignedBuffer::Pages::Default, AlignedBuffer::Pages::Huge}) {
        AlignedBuffer buffer(size, alignment, pages);
        ASSERT_TRUE(aligned(buffer.data(), alignment));
        ASSERT_EQ(buffer.size(), size);
        std::memset(buffer.data(), 0x5A, size);
        EXPECT_EQ(buffer.span().back(), std::byte{0x5A});
      }
    }
  }
}

TEST(AlignedBuffer, EmptyOwnsNothing) {
  AlignedBuffer none;
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(AlignedBuffer(0).data(), nullptr);
  EXPECT_EQ(AlignedBuffer(0, 4_KiB, AlignedBuffer::Pages::Huge).data(), nullptr);
}

TEST(AlignedBuffer, Moves) {
  AlignedBuffer a(4_KiB);
  std::byte* const data = a.data();
  AlignedBuffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_TRUE(a.empty());  // NOLINT: moved-from is empty, as promised
  AlignedBuffer c(8_KiB, 64, AlignedBuffer::Pages::Huge);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.size(), 4_KiB);
}

TEST(AlignedBuffer, ViewsAsElements) {
  AlignedBuffer buffer(10);
  EXPECT_EQ(buffer.as<float>().size(), 2U);
}

TEST(AlignedBuffer, RefusesNonsense) {
  EXPECT_THROW(AlignedBuffer(16, 3), UserError);
  EXPECT_THROW(AlignedBuffer(16, 0), UserError);
  EXPECT_THROW(AlignedBuffer(~Bytes{0}), UserError);
  // More than any address space holds, as an error and not as a crash. Sanitizers stop the program
  // at such a request by themselves, so it is made through the mapping, which they leave alone.
  EXPECT_THROW(AlignedBuffer(Bytes{1} << 60, 4_KiB, AlignedBuffer::Pages::Huge), EngineError);
}

}  // namespace
}  // namespace pagoda

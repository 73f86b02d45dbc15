// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/host_pages.h"

#include <fstream>
#include <sstream>
#include <string>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "pagoda/base/error.h"
#include "pagoda/base/thread_pool.h"

namespace pagoda::device {
namespace {

/// The kernel's flags of the mapping that holds `data`.
std::string vm_flags(const void* data) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(data);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return {};
}

TEST(HostPages, AreAlignedTouchedAndZero) {
  ThreadPool pool(2, "touch");
  for (const Bytes size : {Bytes{1}, 4_KiB, 1_MiB, 2_MiB + 1, 80_MiB}) {
    const HostPages pages(size, HostPages::Touch::Now, &pool);
    const auto address = reinterpret_cast<std::uintptr_t>(pages.data());
    EXPECT_EQ(address % (size < 2_MiB ? 4_KiB : 2_MiB), 0u) << size;
    EXPECT_EQ(pages.mapped(), align_up(size, 4_KiB));
    EXPECT_EQ(pages.data()[0], std::byte{0});
    EXPECT_EQ(pages.data()[size - 1], std::byte{0});
    std::vector<unsigned char> resident(pages.mapped() / 4_KiB);
    ASSERT_EQ(::mincore(pages.data(), pages.mapped(), resident.data()), 0);
    for (const unsigned char page : resident) ASSERT_TRUE(page & 1) << size;
  }
}

TEST(HostPages, AreNotInForkedChildren) {
  const HostPages pages(4_MiB, HostPages::Touch::Later, nullptr);
  const std::string flags = vm_flags(pages.data());
  if (flags.empty()) GTEST_SKIP() << "this kernel does not show the flags of mappings";
  EXPECT_NE(flags.find(" dc "), std::string::npos) << flags;
}

TEST(HostPages, NothingAndTooMuch) {
  const HostPages none(0, HostPages::Touch::Now, nullptr);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_THROW(HostPages(Bytes{1} << 60, HostPages::Touch::Later, nullptr), EngineError);
  EXPECT_THROW(HostPages(~Bytes{0}, HostPages::Touch::Later, nullptr), UserError);
}

}  // namespace
}  // namespace pagoda::device

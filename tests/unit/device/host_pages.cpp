// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/host_pages.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "pagoda/base/budget.h"
#include "pagoda/base/error.h"
#include "pagoda/base/thread_pool.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/host/host_device.h"

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

/// Pages of the process that lie in [data, data + bytes).
std::size_t resident_pages(const std::byte* data, Bytes bytes) {
  std::vector<unsigned char> resident(bytes / 4_KiB);
  EXPECT_EQ(::mincore(const_cast<std::byte*>(data), bytes, resident.data()), 0);
  return static_cast<std::size_t>(
      std::ranges::count_if(resident, [](unsigned char page) { return (page & 1) != 0; }));
}

TEST(HostPages, AHostDevicesMemoryIsThereOnceItIsUsed) {
  const auto device = host::make_device({});
  Budget budget("device", 64_MiB);
  Arena arena(device, budget.reserve(64_MiB, "pages"), {.name = "pages"});
  EXPECT_EQ(resident_pages(arena.data(), 64_MiB), 0U);
  {
    const Block block = arena.allocate(3_MiB, "block");
    std::memset(block.data(), 1, block.size());
  }
  const std::size_t used = resident_pages(arena.data(), 64_MiB);
  EXPECT_GE(used, 3_MiB / 4_KiB);
  EXPECT_LE(used, 4_MiB / 4_KiB);  // whole huge pages, where the kernel has them
  {
    const Block again = arena.allocate(2_MiB, "block");
    std::memset(again.data(), 1, again.size());
  }
  EXPECT_EQ(resident_pages(arena.data(), 64_MiB), used) << "what was touched is used again";
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

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/thread_pins.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace pagoda::pager::thread_pins {
namespace {

thread_local std::vector<const Page*> pins;

}  // namespace

void add(const Page& page) {
  pins.push_back(&page);
}

void forget(const Page& page) noexcept {
  const auto pin = std::find(pins.rbegin(), pins.rend(), &page);
  if (pin != pins.rend()) pins.erase(std::next(pin).base());
}

std::uint32_t count(const Page& page) noexcept {
  return static_cast<std::uint32_t>(std::count(pins.begin(), pins.end(), &page));
}

std::span<const Page* const> all() noexcept {
  return pins;
}

}  // namespace pagoda::pager::thread_pins

// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <cstdint>
#include <span>

#include "pagoda/pager/page.h"

/// Pins that operators of this thread have, of every pager: waiting for those would never end.
namespace pagoda::pager::thread_pins {

void add(const Page& page);
/// One of them, the latest: an operator around this one may have the page pinned, too.
void forget(const Page& page) noexcept;
std::uint32_t count(const Page& page) noexcept;
std::span<const Page* const> all() noexcept;

}  // namespace pagoda::pager::thread_pins

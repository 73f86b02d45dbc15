// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include "pagoda/device/stream.h"
#include "pagoda/pager/page_table.h"

/// Streams that read a page's home: whoever changes, moves or frees a home waits for them first.
/// (Those who read it from outside the pager are counted: PageRecord::readers.)
namespace pagoda::pager::home_reads {

/// A stream has been given something that reads the page's home until `mark`.
void note(PageRecord& page, device::Mark mark, const PageTable::Lock& lock) noexcept;
/// Whether streams may still have to read it. (A fetch counts as done when its copies are queued.)
bool any(const PageRecord& page, const PageTable::Lock& lock) noexcept;
/// Returns when they have; throws if the copy of the page that is there has failed. The lock is
/// open meanwhile.
void wait(PageRecord& page, PageTable::Lock& lock);
/// The same, but not for the copy of the page that is there.
void wait_for_earlier(PageRecord& page, PageTable::Lock& lock) noexcept;
/// As wait(), for a page that goes: nobody needs its copy any more.
void wait_ignoring_errors(PageRecord& page, PageTable::Lock& lock) noexcept;

}  // namespace pagoda::pager::home_reads

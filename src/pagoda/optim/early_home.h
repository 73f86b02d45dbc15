// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/home.h"
#include "pagoda/pager/pager.h"

namespace pagoda::optim {

/// Where an early update of the page leaves its parameters until step() ("Early updates" in
/// docs/notes/lazy-updates.md); null: nowhere, so there is none. Any thread.
pager::Home* early_home(TrainedPage& page, bool reversible, pager::Pager& pager);

/// Whether what is in `next` becomes the page's home by changing places with it. Any thread.
bool exchanges_home(const TrainedPage& page, const pager::Home& next, pager::Pager& pager);

}  // namespace pagoda::optim

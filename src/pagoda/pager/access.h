// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/error.h"
#include "pagoda/pager/page.h"

namespace pagoda::pager {

/// A page and what an operator does with it.
struct Access {
  Page* page = nullptr;
  bool write = false;
};

/// A page that may move was about to be captured into a CUDA graph. Nothing else has happened.
class NotHeld : public UserError {
 public:
  using UserError::UserError;
};

/// An operator's pages do not fit into the device budget together. The message names them.
class OperatorTooLarge : public UserError {
 public:
  using UserError::UserError;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pagoda/kernels/element.h"
#include "pagoda/pager/home.h"
#include "pagoda/pager/pager.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::optim {

/// A run of consecutive elements of a page that belong to one parameter.
struct Segment {
  pager::Range range;             // in the page
  std::uint32_t parameter = 0;    // which of the page's parameters
  std::uint64_t first_index = 0;  // of the run within the parameter, in the order of the storage
};

/// One parameter that is trained: all of a page, nearly always, or one of several views of it.
struct TrainedParameter {
  std::uint32_t index = 0;  // in the model: seeds its rounding
  std::uint32_t group = 0;
  std::uint64_t updates = 0;  // steps it has taken: the updater's
  bool used = false;          // has a gradient in this step: the engine's, between steps
  bool filled = false;        // its accumulator has a gradient: the gradients' thread
  /// Given to the optimizer and not trained (docs/notes/thaw.md): its gradients are dropped. The
  /// gradients' thread, and step() in between.
  bool frozen = false;
};

/// A page with gradient and optimizer state. Made when a model is attached; who may change what is
/// said beside each field.
struct TrainedPage {
  pager::Page* page = nullptr;
  std::uint32_t number = 0;  // position in the engine's list: the order of norms
  kernels::Dtype dtype = kernels::Dtype::F32;
  kernels::Dtype gradient_dtype = kernels::Dtype::F32;
  std::vector<Segment> segments;  // in ascending order
  std::vector<TrainedParameter> parameters;
  /// Elements whose gradient sum arrives at this rank, and whose state it keeps and updates.
  pager::Range reduced;
  pager::Range updated;
  /// Accumulated gradient of gradient_range, in gradient_dtype.
  pager::Home gradient;
  pager::Range gradient_range;
  /// Master and moments of `updated`, as StateLayout says. Blank before the first update.
  pager::Home state;
  bool state_blank = true;  // the updater's
  /// Where an early update that can be rolled back writes master and moments. When step() takes it,
  /// `state` and `spare` change places: the updater's.
  pager::Home spare;
  /// Where an early update writes the parameters of `updated` until step() takes them, if not over
  /// the gradient that it has used up: the updater's.
  pager::Home next;
  /// Sums of squares of each block of `reduced`, when norms are kept: the gradients' thread.
  std::vector<double> squares;
  /// With stage 0: what the other ranks have reduced is in `gradient`, too. The same on all ranks.
  bool gathered = false;
  /// A parameter of it was thawed since the last step: its update waits for step(), in which the
  /// ranks agree. The gradients' thread, and step() in between.
  bool joining = false;

  std::uint64_t elements() const noexcept { return page->elements; }
  /// The page's own home: for whoever makes its next version (Pager::home()).
  pager::Home& home() const noexcept { return pager::Pager::home(*page); }
  pager::Range home_range() const noexcept { return pager::Pager::home_range(*page); }
  /// Whether any of its parameters has a gradient in this step.
  bool filled() const noexcept {
    return std::any_of(parameters.begin(), parameters.end(),
                       [](const TrainedParameter& parameter) { return parameter.filled; });
  }
  /// Whether it is one parameter from end to end, as nearly all are.
  bool one_parameter() const noexcept {
    return segments.size() == 1 && parameters.size() == 1 && segments[0].range.size() == elements();
  }
  Bytes gradient_bytes() const noexcept {
    return gradient_range.size() * kernels::element_size(gradient_dtype);
  }
};

}  // namespace pagoda::optim

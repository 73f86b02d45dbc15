// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pagoda/engine/frozen_parameters.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/page.h"

namespace pagoda::engine {

/// The pages of the model that is attached, and those of them that are trained. Pages of which all
/// parameters are frozen are with FrozenParameters, until one is thawed.
///
/// The thread that trains changes it, in a collective call; others may look between two calls.
class AttachedModel {
 public:
  explicit AttachedModel(FrozenParameters& frozen) : frozen_(frozen) {}

  bool empty() const noexcept { return trained_.empty() && frozen_.none(); }
  const std::vector<pager::Page*>& pages() const noexcept { return pages_; }
  /// In the order of their numbers.
  std::span<const std::unique_ptr<optim::TrainedPage>> trained() const noexcept { return trained_; }
  /// Last parameter first: the order in which gradients come, until more is known.
  std::vector<optim::TrainedPage*> last_first() const;
  /// The page's form for the optimizer, trained or frozen; null where it was not given to it.
  optim::TrainedPage* find(const pager::Page& page) const noexcept;
  bool trains(const pager::Page& page) const noexcept;

  void set_pages(std::vector<pager::Page*> pages) { pages_ = std::move(pages); }
  /// Shares the pages out: those with a parameter to train now, and those without.
  void set_trained(const std::vector<FrozenSpec>& frozen,
                   std::vector<std::unique_ptr<optim::TrainedPage>> pages);
  /// Pages that have got gradient and state in the rounds so far are like any other.
  void take_joined();
  /// The reverse: hands over the pages of which all parameters are frozen again.
  std::vector<std::unique_ptr<optim::TrainedPage>> take_frozen();
  void clear_trained();
  void clear_pages() noexcept { pages_.clear(); }

 private:
  FrozenParameters& frozen_;
  std::vector<pager::Page*> pages_;
  std::vector<std::unique_ptr<optim::TrainedPage>> trained_;
};

}  // namespace pagoda::engine

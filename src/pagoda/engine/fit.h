// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/engine/host_buffers.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::engine {

/// One state of a model, page by page, and where it is to lie.
struct StateNeed {
  std::string_view state;
  pager::Placement placement = pager::Placement::Auto;
  std::vector<Bytes> pages = {};

  Bytes bytes() const noexcept;
  /// What it takes of the device's memory: whole blocks.
  Bytes device_bytes() const noexcept;
};

/// A model's states beside the room that there is for them. Does in advance what allocation will
/// do, page by page: what does not fit is refused before anything moves. A plain value.
class Fit {
 public:
  /// The room that is left now, beside `own` buffers, of which a larger host_budget has more.
  Fit(const pager::Tiers& tiers, const HostBuffers& own);

  /// What a page has now counts as free: `parameters` has it once more.
  void hold(const pager::Home& home);
  /// Host memory that must be there whatever lies elsewhere.
  void need_buffers(Bytes bytes) noexcept { buffers_ += bytes; }
  /// A page must have room beside what is placed on the device.
  void need_page(std::string_view name, Bytes bytes);

  /// Whose states they are, as messages say it.
  std::string_view whose = "the model's";
  StateNeed parameters{"parameters"};
  StateNeed gradients{"gradients"};
  StateNeed optimizer{"optimizer"};
  /// Gradients that wait for their turn, which go wherever there is room.
  StateNeed waiting{"gradients in wait"};
  /// Whether a parameter is kept as it is, and not as one rank's shard of it.
  bool whole_parameters = true;

  /// Whether all parameters have room on the device, beside what else is placed there.
  bool parameters_fit_on_device() const noexcept;
  /// UserError unless everything fits: what needs how much, which key has how much, and the
  /// smallest value of it that works.
  void check() const;

 private:
  struct Named {
    std::string name;
    Bytes bytes = 0;
  };
  /// What a tier may hold, and what of it is free.
  struct Room {
    Bytes limit = 0;
    Bytes free = 0;
  };
  struct Missing {
    Bytes host = 0;
    Bytes nvme = 0;
    bool none() const noexcept { return host == 0 && nvme == 0; }
  };

  void check_device() const;
  /// Fills host and NVMe as allocation would, if the budgets were these.
  Missing fill(Bytes host_budget, Bytes nvme_budget) const;
  /// The smallest host_budget that everything fits in, as a message prints it; nothing where none
  /// helps.
  std::optional<Bytes> least_host_budget(Bytes nvme_budget) const;
  std::string list() const;
  std::vector<const StateNeed*> states() const;

  const pager::Tiers& tiers_;
  HostBuffers own_;
  Bytes device_;  // for pages
  Room host_;
  Room nvme_;
  Bytes buffers_ = 0;
  Named largest_page_;
};

}  // namespace pagoda::engine

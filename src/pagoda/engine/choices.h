// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pagoda {

/// Where a kind of state lies when it is not in use.
enum class Placement {
  Auto,    ///< fills the device, then the host, then NVMe
  Device,  ///< device memory
  Host,    ///< pinned host memory; spills to NVMe, page by page, when its budget is full
  Nvme,    ///< files in the directories of `nvme`
};

/// What attach() does about parameters and buffers that ranks start with different values of.
enum class Initial {
  Broadcast,  ///< rank 0's values are everyone's
  Check,      ///< an error that names the first
};

/// The type in which gradients of several micro-batches are added up.
enum class GradientType {
  Parameter,  ///< that of the parameter
  Fp32,
};

/// How gradients of ranks and micro-batches become one.
enum class Reduction { Mean, Sum };

/// How the fp32 master of a 16-bit parameter is kept.
enum class Master {
  Whole,  ///< four bytes beside the parameter
  Split,  ///< two bytes, which make it up with a bf16 parameter; the same numbers
};

/// The type in which the optimizer's moments are kept.
enum class MomentType { Fp32, Bf16 };

/// What a loss is multiplied by before backward, and gradients divided by after it.
struct LossScale {
  enum class Kind {
    None,
    Dynamic,  ///< falls when a gradient overflows, rises after some steps without
    Fixed,
  };
  Kind kind = Kind::None;
  double value = 1;  ///< of Kind::Fixed

  friend bool operator==(const LossScale&, const LossScale&) = default;
};

}  // namespace pagoda

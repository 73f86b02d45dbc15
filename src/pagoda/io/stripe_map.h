// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/bytes.h"

namespace pagoda::io {

/// Where a byte of a space lies: stripes of `stripe` bytes go round the files in turn. Immutable.
class StripeMap {
 public:
  struct Place {
    unsigned file;
    Bytes offset;
  };

  StripeMap(unsigned files, Bytes stripe) : files_(files), stripe_(stripe) {}

  /// Contiguous up to the next multiple of the stripe.
  Place place(Bytes position) const noexcept {
    const Bytes stripe = position / stripe_;
    return {static_cast<unsigned>(stripe % files_),
            (stripe / files_) * stripe_ + position % stripe_};
  }

  /// Bytes of a space of `capacity` that lie in `file`; the files' sum is the capacity.
  Bytes file_size(unsigned file, Bytes capacity) const noexcept {
    const Bytes stripes = capacity / stripe_;
    const Bytes whole = stripes / files_ + (file < stripes % files_ ? 1 : 0);
    return whole * stripe_ + (file == stripes % files_ ? capacity % stripe_ : 0);
  }

 private:
  unsigned files_;
  Bytes stripe_;
};

}  // namespace pagoda::io

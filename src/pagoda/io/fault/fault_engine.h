// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "pagoda/io/engine.h"
#include "pagoda/io/fault/fault_plan.h"

namespace pagoda::io {

/// `inner` with the faults of `plan`: for tests, and for seeing what a program does when a disk
/// goes. Delayed requests are completed by a thread of its own.
std::unique_ptr<Engine> make_fault_engine(std::unique_ptr<Engine> inner,
                                          std::shared_ptr<FaultPlan> plan);

}  // namespace pagoda::io

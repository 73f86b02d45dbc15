// SPDX-License-Identifier: Apache-2.0
// One case of the parity proof: a model, a training and a configuration. Includes no torch.
#pragma once

#include <string>
#include <vector>

#include "torch/covering.h"
#include "torch/paged_loop.h"

namespace zoo {

struct ParityCase {
  Options options;
  Training training;
  pagoda::Config config;
  Backward backward = Backward::Engine;
};

/// What varies: models, types, placements, stages, ranks, budgets, ways of training.
const std::vector<covering::Dimension>& parity_dimensions();
/// Leaves out what does not exist: checkpoints in models without blocks, split masters elsewhere
/// than with bf16 and Adam, …
bool parity_allowed(const covering::Combination& combination);
ParityCase parity_case(const covering::Combination& combination);

/// Where two trainings differ, in one line; empty where they do not.
std::string difference(const Trained& expected, const Trained& got);

/// Trains the case through the engine and without it; empty if all bits are equal and no budget was
/// exceeded, else what is wrong. References are computed once for all cases that share one.
std::string check_parity(const ParityCase& parity);

/// Bytes of a device budget in which the largest operator of a model just fits, and its gradient.
void set_tight_budget(pagoda::Config& config, const Options& options);
/// Small staging, so that small models go through it in several pieces.
void set_small_pieces(pagoda::Config& config);
/// A directory for swap files that goes with the process.
std::string scratch_directory();

}  // namespace zoo

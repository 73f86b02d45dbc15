// SPDX-License-Identifier: Apache-2.0
// What users do with their models beside training them, done through an engine and without one.
// Includes no torch.
#pragma once

#include <string>
#include <vector>

#include "pagoda/engine/config.h"
#include "torch/zoo.h"

namespace zoo {

struct Setting {
  pagoda::Config config;
  int ranks = 1;
  Dtype dtype = Dtype::BF16;
};

/// One habit. Returns what went wrong in a line; empty if the bits are those of plain tensors.
struct Quirk {
  const char* name;
  std::string (*run)(const Setting& setting);
};

/// Those that hold with any configuration and any number of ranks.
std::vector<Quirk> quirks();

/// What the engine says to something it refuses; "nothing" if it does not.
std::string refusal_of_double();
std::string refusal_of_complex();
std::string refusal_of_integers();
std::string refusal_of_meta();
std::string refusal_of_constants();
std::string refusal_of_overlap();
std::string refusal_of_sparse_gradients();
std::string refusal_of_two_models();
std::string refusal_of_other_values(int rank);
std::string exchanged_storage_of_another_type();
/// At attach, with this configuration.
std::string refusal_of(const pagoda::Config& config);

/// An operator whose pages do not fit: what it throws, what the engine throws at its next step.
struct TooLarge {
  std::string by_operator;
  std::string by_engine;
};
TooLarge too_large_operator();

/// What reading an absent parameter's pointer throws, and once its engine has gone.
std::string raw_pointer_of_absent();
std::string raw_pointer_after_engine();

// One engine alone; each as in Quirk.
std::string pinned_is_readable();
std::string late_parameter_stays_plain();
std::string exchanged_storage_after_attach(int ranks);

}  // namespace zoo

// SPDX-License-Identifier: Apache-2.0
// Small models of many kinds, each a plain torch::nn::Module that knows nothing of Pagoda. This
// header includes no torch, so that a test that only names models compiles fast.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/kernels/element.h"

namespace at {
class Tensor;
}
namespace torch::nn {
class Module;
}

namespace zoo {

using pagoda::kernels::Dtype;

enum class Kind : std::uint8_t {
  Gpt,      ///< two pre-norm blocks with attention, a head of its own
  TiedGpt,  ///< the embedding's weight is the head: one tensor, registered in two modules
  Moe,      ///< eight experts; the batch decides which three or fewer are used
  Conv,     ///< convolutions, batch norm (with buffers), group norm, linear
  Lstm,     ///< torch::nn::LSTM, two layers
  Loop,     ///< one block used five times
  // The awkward ones: one trait each.
  Views,       ///< three parameters are views of one storage
  Transposed,  ///< a parameter that is not contiguous
  Frozen,      ///< a layer without gradients between two that train, and one bias
  Outside,     ///< a parameter used by a module that does not own it
  Empty,       ///< a parameter with no elements
  Mixed,       ///< two element types in one model
};

/// What a block keeps for its backward.
enum class Checkpointing : std::uint8_t {
  None,
  Reentrant,   ///< nothing; its backward runs the forward again and calls backward inside
  SavedHooks,  ///< nothing; the first saved tensor that is unpacked runs the forward again
};

/// How a model that is not fp32 comes to its type.
enum class Casting : std::uint8_t {
  AsBuilt,     ///< each module is cast, or made in the type, before the next one exists
  Afterwards,  ///< module.to(dtype) on the whole model
};

struct Options {
  Kind kind = Kind::Gpt;
  Dtype dtype = Dtype::F32;
  Checkpointing checkpointing = Checkpointing::None;
  Casting casting = Casting::AsBuilt;
  std::uint64_t seed = 1;  ///< of the initial values
  std::string device = "cpu";
};

std::span<const Kind> all_kinds();
/// "gpt", "tied_gpt", …, "mixed"; "none", "reentrant", "saved_hooks".
std::string_view name(Kind kind);
std::string_view name(Checkpointing checkpointing);
/// The reverse; throw UserError that lists the names.
Kind parse_kind(std::string_view text);
Checkpointing parse_checkpointing(std::string_view text);

/// Whether make() knows this combination: only Gpt, TiedGpt and Loop have blocks to checkpoint.
bool exists(const Options& options);

/// A new model in training mode. Its values depend on the options alone: not on `casting`, on what
/// other threads do, or on torch's own generator (which the modules' constructors do advance). Any
/// thread. Throws UserError where !exists().
std::shared_ptr<::torch::nn::Module> make(const Options& options);

/// The fp32 loss of a module that make() returned, on a batch made from the seed, with its graph.
/// One thread at a time per module. No dropout: the seed is all there is.
at::Tensor loss(::torch::nn::Module& module, std::uint64_t batch_seed);

/// The seed of one rank's batch: different for every (rank, step, micro-batch).
std::uint64_t batch_seed(std::uint64_t seed, int rank, int step, int micro_batch);

/// Torch's own operators may give other bits with another number of threads. Call this on each
/// thread that computes (the number is the thread's own) before comparing bits.
void use_one_torch_thread();

/// One parameter's value or gradient, element by element in the order of its indices.
struct Bits {
  std::string name;  ///< as first registered
  Dtype type = Dtype::F32;
  bool present = true;           ///< false: a gradient that is not there
  std::vector<std::byte> bytes;  ///< little endian, as they lie in memory

  friend bool operator==(const Bits&, const Bits&) = default;
};

/// How a model's parameters lie in memory.
struct Layout {
  int parameters = 0;  ///< each once
  int storages = 0;    ///< that hold them
  int contiguous = 0;  ///< parameters that are
};
Layout layout(const ::torch::nn::Module& module);

/// All parameters, each once, in the order of registration. Read by torch operators.
std::vector<Bits> parameter_bits(const ::torch::nn::Module& module);

/// The gradients that loss(module, batch_seed).backward() leaves, none before and none after.
std::vector<Bits> gradient_bits(::torch::nn::Module& module, std::uint64_t batch_seed);

}  // namespace zoo

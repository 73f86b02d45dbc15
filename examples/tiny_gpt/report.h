// SPDX-License-Identifier: Apache-2.0
// What the demo prints besides its progress.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flags.h"
#include "pagoda/engine/stats.h"
#include "text.h"

namespace tiny_gpt {

/// The model, the text, and how little memory there is.
std::string opening(const Flags& flags, std::int64_t parameters, const Text& text);
/// Where each byte lived: by tier and by what it is for, in all and for each parameter.
std::string where_bytes_lived(const pagoda::engine::Stats& stats, std::int64_t parameters);
/// What went on while operators ran, and what they waited for. `in_step`: seconds in engine.step().
std::string what_overlapped(const pagoda::engine::Stats& stats, double in_step);
/// Losses of the first steps, on disk and in memory. The second are a beginning of the first.
std::string comparison(const std::vector<float>& paged, const std::vector<float>& resident);
bool same_bits(const std::vector<float>& paged, const std::vector<float>& resident);
/// Three sentences for somebody who has never heard of any of this.
std::string closing(const pagoda::engine::Stats& stats, std::int64_t parameters,
                    const std::vector<float>& losses, std::int64_t compared);

}  // namespace tiny_gpt

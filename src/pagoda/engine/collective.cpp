// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/collective.h"

#include <algorithm>
#include <array>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/engine/failure.h"

namespace pagoda::engine {
namespace {

/// As sent. Ranks run the same program on the same kind of machine: no byte order to agree on.
struct WireCall {
  std::uint64_t call = 0;
  std::uint64_t steps = 0;
  std::uint64_t rules = 0;
  std::uint64_t writes = 0;
  std::uint64_t value = 0;
  std::uint64_t thawed = 0;
  std::uint64_t refused = 0;
  std::array<char, 32> label{};
  std::array<char, 128> detail{};
};

/// Whether a cut there would be inside a character: texts are UTF-8.
bool is_inside(std::string_view text, std::size_t at) {
  return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U;
}

/// A text that is too long loses its middle: names of parameters differ at their ends.
template <std::size_t kSize>
void write_text(std::array<char, kSize>& to, std::string_view text) {
  constexpr std::string_view kCut = "…";
  constexpr std::size_t kMost = kSize - 1;
  if (text.size() <= kMost) {
    text.copy(to.data(), kMost);
    return;
  }
  std::size_t head = kMost / 3;
  while (is_inside(text, head)) --head;
  std::size_t tail = text.size() - (kMost - head - kCut.size());
  while (is_inside(text, tail)) ++tail;
  fmt::format("{}{}{}", text.substr(0, head), kCut, text.substr(tail)).copy(to.data(), kMost);
}

template <std::size_t kSize>
std::string read_text(const std::array<char, kSize>& from) {
  return {from.begin(), std::find(from.begin(), from.end(), '\0')};
}

std::string_view name_of(Call call) {
  switch (call) {
    case Call::Backward:
      return "backward";
    case Call::Attach:
      return "attach";
    case Call::Step:
      return "step";
    case Call::Join:
      return "join";
    case Call::ZeroGrad:
      return "zero_grad";
    case Call::Grad:
      return "grad";
    case Call::GradNorm:
      return "grad_norm";
    case Call::Barrier:
      return "barrier";
    case Call::Release:
      return "release";
    case Call::Close:
      return "close";
  }
  return "?";
}

/// What a rank that has joined does with the others.
bool can_be_followed(Call call) {
  return call == Call::Step || call == Call::ZeroGrad || call == Call::Grad ||
         call == Call::GradNorm;
}

/// Whether two ranks make the same call, as far as the call itself tells. (`detail` is for
/// messages, and may have been cut.)
bool same_call(const Collective& a, const Collective& b) {
  return a.call == b.call && a.label == b.label && a.detail == b.detail && a.value == b.value &&
         a.steps == b.steps;
}

}  // namespace

std::string Collective::where() const {
  const std::string written =
      fmt::format("{}({})", label.empty() ? std::string(name_of(call)) : label,
                  call == Call::Step ? "" : detail);
  if (call == Call::Step) return fmt::format("in {} {}", written, steps + 1);
  if (call == Call::Backward) return fmt::format("in {} of step {}", written, steps + 1);
  if (steps == 0) return fmt::format("in {} before the first step()", written);
  return fmt::format("in {} after step() {}", written, steps);
}

std::vector<Collective> exchange(comm::Group& group, const Collective& mine) {
  WireCall sent;
  sent.call = static_cast<std::uint64_t>(mine.call);
  sent.steps = mine.steps;
  sent.rules = mine.rules;
  sent.writes = mine.writes;
  sent.value = mine.value;
  sent.thawed = mine.thawed ? 1 : 0;
  sent.refused = mine.refused ? 1 : 0;
  write_text(sent.label, mine.label);
  write_text(sent.detail, mine.detail);
  std::vector<WireCall> received(static_cast<std::size_t>(group.size()));
  std::vector<std::span<std::byte>> parts;
  for (WireCall& one : received) parts.push_back(std::as_writable_bytes(std::span(&one, 1)));
  group.all_gather(std::as_bytes(std::span(&sent, 1)), parts);
  std::vector<Collective> out;
  for (const WireCall& one : received) {
    out.push_back({static_cast<Call>(one.call), read_text(one.label), read_text(one.detail),
                   one.steps, one.rules, one.writes, one.value, one.thawed != 0, one.refused != 0});
  }
  return out;
}

const Collective& call_of_all(std::span<const Collective> ranks) {
  const auto stayed = std::find_if(ranks.begin(), ranks.end(),
                                   [](const Collective& one) { return one.call != Call::Join; });
  if (stayed == ranks.end()) return ranks.front();
  const bool together = std::all_of(ranks.begin(), ranks.end(), [&](const Collective& one) {
    if (one.call == Call::Join) return can_be_followed(stayed->call) && one.steps == stayed->steps;
    return same_call(one, *stayed);
  });
  if (together) return *stayed;
  throw Diverged(fmt::format(
      "the ranks are in different calls: {}. Every rank makes the same calls of the engine in the "
      "same order; a rank that has run out of batches calls join()",
      where_ranks_are(ranks)));
}

std::string where_ranks_are(std::span<const Collective> ranks) {
  constexpr std::size_t kMost = 5;
  std::vector<std::pair<std::string, std::vector<std::size_t>>> places;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::string where = ranks[rank].where();
    const auto known = std::find_if(places.begin(), places.end(),
                                    [&](const auto& place) { return place.first == where; });
    if (known == places.end()) {
      places.push_back({where, {rank}});
    } else {
      known->second.push_back(rank);
    }
  }
  std::string out;
  for (std::size_t i = 0; i < std::min(places.size(), kMost); ++i) {
    const auto& [where, here] = places[i];
    const std::size_t shown = std::min(here.size(), kMost);
    out += fmt::format(
        "{}{} {}{} {}{}", i == 0 ? "" : ", ", here.size() == 1 ? "rank" : "ranks",
        fmt::join(here.begin(), here.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
        shown < here.size() ? fmt::format(" and {} more", here.size() - shown) : "",
        i > 0              ? ""
        : here.size() == 1 ? "is "
                           : "are ",
        where);
  }
  if (places.size() > kMost) out += fmt::format(" and {} more places", places.size() - kMost);
  return out;
}

}  // namespace pagoda::engine

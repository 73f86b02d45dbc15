// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/agreement.h"

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <span>

#include "pagoda/base/error.h"
#include "pagoda/base/out_of_memory.h"
#include "pagoda/engine/failure.h"
#include "pagoda/io/checksum.h"
#include "pagoda/kernels/rounding_counter.h"

namespace pagoda::engine {
namespace {

std::vector<std::uint64_t> gather_numbers(comm::Group& group, std::uint64_t mine) {
  std::vector<std::uint64_t> out(static_cast<std::size_t>(group.size()));
  std::vector<std::span<std::byte>> parts;
  for (std::uint64_t& one : out) parts.push_back(std::as_writable_bytes(std::span(&one, 1)));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), parts);
  return out;
}

std::string broadcast_text(comm::Group& group, std::string mine, int root) {
  std::uint64_t size = mine.size();
  group.broadcast(std::as_writable_bytes(std::span(&size, 1)), root);
  mine.resize(size);
  group.broadcast(std::as_writable_bytes(std::span(mine)), root);
  return mine;
}

/// One line of a Settings text; empty at its end.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::pair<std::string_view, std::string_view> name_and_value(std::string_view line) {
  const std::size_t tab = std::min(line.find('\t'), line.size());
  return {line.substr(0, tab), line.substr(std::min(tab + 1, line.size()))};
}

std::string seen_from(std::string_view line, std::string_view name) {
  const auto [its_name, value] = name_and_value(line);
  if (line.empty()) return "none";
  return its_name == name ? std::string(value) : fmt::format("{} = {}", its_name, value);
}

std::vector<std::pair<std::string_view, double>> constants_in(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& rule) {
        std::vector<std::pair<std::string_view, double>> out{{"lr", rule.lr}};
        if constexpr (requires { rule.beta1; }) {
          out.insert(out.end(), {{"beta1", rule.beta1}, {"beta2", rule.beta2}});
        }
        if constexpr (requires { rule.eps; }) out.emplace_back("eps", rule.eps);
        if constexpr (requires { rule.momentum; }) {
          out.insert(out.end(), {{"momentum", rule.momentum},
                                 {"dampening", rule.dampening},
                                 {"nesterov", rule.nesterov ? 1 : 0}});
        }
        out.emplace_back("weight_decay", rule.weight_decay);
        return out;
      },
      optimizer);
}

}  // namespace

void all_or_none(comm::Group* group, const std::function<void()>& work) {
  std::exception_ptr mine;
  std::string text;
  try {
    work();
  } catch (const OutOfMemory& error) {  // of the machine: everything is as it was
    mine = std::current_exception();
    text = error.message();
  } catch (const EngineError&) {
    throw;
  } catch (const UserError& error) {
    mine = std::current_exception();
    text = error.message();
  } catch (const std::exception& error) {
    mine = std::current_exception();
    text = error.what();
  }
  if (mine != nullptr && text.empty()) text = "it gave no reason";
  if (group == nullptr) {
    if (mine != nullptr) throw NoneDid{mine};
    return;
  }
  const std::vector<std::uint64_t> sizes = gather_numbers(*group, text.size());
  const auto bad = std::find_if(sizes.begin(), sizes.end(), [](auto size) { return size > 0; });
  if (bad == sizes.end()) return;
  const auto rank = static_cast<int>(bad - sizes.begin());
  const std::string theirs = broadcast_text(*group, text, rank);
  throw NoneDid{mine != nullptr
                    ? mine
                    : std::make_exception_ptr(UserError(fmt::format("rank {}: {}", rank, theirs)))};
}

void Settings::add(std::string name, std::string value) {
  lines_.emplace_back(std::move(name), std::move(value));
}

std::string Settings::text() const {
  std::string out;
  for (const auto& [name, value] : lines_) out += fmt::format("{}\t{}\n", name, value);
  return out;
}

std::uint64_t Settings::hash() const {
  const std::string all = text();
  return io::checksum(std::as_bytes(std::span(all)));
}

void Settings::require_equal(comm::Group& group) const {
  const std::vector<std::uint64_t> hashes = gather_numbers(group, hash());
  const auto other = std::find_if(hashes.begin(), hashes.end(),
                                  [&](std::uint64_t one) { return one != hashes[0]; });
  if (other == hashes.end()) return;
  const auto rank = static_cast<int>(other - hashes.begin());
  const std::string of_first = broadcast_text(group, text(), 0);
  const std::string of_other = broadcast_text(group, text(), rank);
  std::string_view first = of_first;
  std::string_view second = of_other;
  while (!first.empty() || !second.empty()) {
    const std::string_view a = take_line(first);
    const std::string_view b = take_line(second);
    if (a == b) continue;
    const std::string_view name = name_and_value(a.empty() ? b : a).first;
    throw Diverged(
        fmt::format("the ranks differ in {}: it is {} on rank 0 and {} on rank {}. Give "
                    "every rank the same",
                    name, seen_from(a, name), seen_from(b, name), rank));
  }
  throw EngineError("hashes of equal settings differ");
}

std::string text_of(const Optimizer& optimizer) {
  std::string constants;
  for (const auto& [name, value] : constants_in(optimizer)) {
    constants += fmt::format("{}{}={}", constants.empty() ? "" : ", ", name, value);
  }
  return fmt::format("{}({})", optim::name(optimizer), constants);
}

std::uint64_t hash_of(const std::vector<Optimizer>& rules) {
  std::uint64_t out = rules.size();
  for (const Optimizer& rule : rules) {
    out = kernels::mix64(out ^ rule.index());
    for (const auto& [name, value] : constants_in(rule)) {
      out = kernels::mix64(out ^ std::bit_cast<std::uint64_t>(value));
    }
  }
  return out;
}

}  // namespace pagoda::engine

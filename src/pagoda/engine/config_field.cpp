// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/config_field.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <mutex>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/engine/nearest_word.h"
#include "pagoda/engine/step_trace.h"
#include "pagoda/optim/loss_scale.h"

namespace pagoda {
namespace {

/// The name of the field and its place in Config: the same word, written once.
#define PAGODA_FIELD(name) #name, &Config::name

/// A value is not what the field's type says, or is so for a reason that the type does not say.
[[noreturn]] void refuse(std::string reason = {}) {
  throw UserError(std::move(reason));
}

template <class Number>
Number parse_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) refuse();
  return value;
}

// More than any machine has, and sums of such sizes do not wrap around.
constexpr Bytes kMostBytes = Bytes{1} << 60;

/// A size between two others.
Bytes parse_bytes_between(std::string_view text, Bytes least, Bytes most) {
  Bytes value = 0;
  try {
    value = parse_bytes(text);
  } catch (const UserError&) {
    refuse();
  }
  if (value < least) refuse();
  if (value > most) refuse(fmt::format("it is more than {}", format_bytes(most)));
  return value;
}

/// Exactly, and readable where that is possible.
std::string print_bytes(Bytes value) {
  const std::string readable = format_bytes(value);
  const bool exact = value >= 1_KiB && readable.find('.') == std::string::npos;
  return exact ? readable : fmt::format("{}", value);
}

ConfigField bytes(const char* name, Bytes Config::*member, std::string help, Bytes least = 0,
                  Bytes most = kMostBytes) {
  const bool open = least == 0 && most == kMostBytes;
  return {name,
          open ? "a byte size such as 8GiB"
               : fmt::format("a byte size from {} to {}", format_bytes(least), format_bytes(most)),
          std::move(help),
          JsonForm::NumberOrText,
          [=](Config& config, std::string_view text) {
            config.*member = parse_bytes_between(text, least, most);
          },
          [member](const Config& config) { return print_bytes(config.*member); }};
}

ConfigField optional_bytes(const char* name, std::optional<Bytes> Config::*member,
                           std::string help) {
  return {name,
          "a byte size > 0 such as 8GiB, or none",
          std::move(help),
          JsonForm::NumberOrText,
          [member](Config& config, std::string_view text) {
            config.*member = text == "none"
                                 ? std::nullopt
                                 : std::optional(parse_bytes_between(text, 1, kMostBytes));
          },
          [member](const Config& config) {
            const auto& value = config.*member;
            return value ? print_bytes(*value) : std::string("none");
          }};
}

template <class Number>
ConfigField whole(const char* name, Number Config::*member, Number least, Number most,
                  std::string help) {
  return {name,
          fmt::format("an integer from {} to {}", least, most),
          std::move(help),
          JsonForm::Number,
          [=](Config& config, std::string_view text) {
            const Number value = parse_number<Number>(text);
            if (value < least || value > most) refuse();
            config.*member = value;
          },
          [member](const Config& config) { return fmt::format("{}", config.*member); }};
}

ConfigField real(const char* name, double Config::*member, bool zero, std::string help,
                 double most = std::numeric_limits<double>::max()) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::string type = zero ? "a number ≥ 0" : "a number > 0";
  if (most < std::numeric_limits<double>::max()) type += fmt::format(", at most {}", most);
  if (most == kInfinity) type += ", or inf";
  return {name,
          std::move(type),
          std::move(help),
          most == kInfinity ? JsonForm::NumberOrInf : JsonForm::Number,
          [=](Config& config, std::string_view text) {
            const auto value = parse_number<double>(text);
            if (!std::isfinite(value) && value != most) refuse("it is not finite");
            if (value < 0 || (value == 0 && !zero) || value > most) refuse();
            config.*member = value;
          },
          [member](const Config& config) { return fmt::format("{}", config.*member); }};
}

ConfigField truth(const char* name, bool Config::*member, std::string help) {
  return {name,
          "true or false",
          std::move(help),
          JsonForm::Bool,
          [member](Config& config, std::string_view text) {
            if (text != "true" && text != "false") refuse();
            config.*member = text == "true";
          },
          [member](const Config& config) { return config.*member ? "true" : "false"; }};
}

template <class Choice>
using Words = std::vector<std::pair<Choice, std::string>>;

template <class Choice>
ConfigField choice(const char* name, Choice Config::*member, const Words<Choice>& words,
                   std::string help) {
  std::string type = words.front().second;
  for (std::size_t i = 1; i < words.size(); ++i) {
    type += (i + 1 < words.size() ? ", " : " or ") + words[i].second;
  }
  return {name,
          type,
          std::move(help),
          JsonForm::Text,
          [=](Config& config, std::string_view text) {
            for (const auto& [value, word] : words) {
              if (word == text) {
                config.*member = value;
                return;
              }
            }
            refuse();
          },
          [=](const Config& config) {
            for (const auto& [value, word] : words) {
              if (value == config.*member) return word;
            }
            return fmt::format("{}", static_cast<int>(config.*member));
          }};
}

ConfigField text_field(const char* name, std::string Config::*member, std::string type,
                       void (*check)(std::string_view), std::string help) {
  return {name,
          std::move(type),
          std::move(help),
          JsonForm::Text,
          [=](Config& config, std::string_view text) {
            if (check != nullptr) check(text);
            config.*member = text;
          },
          [member](const Config& config) { return config.*member; }};
}

void check_device(std::string_view text) {
  constexpr std::string_view kCuda = "cuda:";
  if (text == "auto" || text == "cpu" || text == "cuda" || text == "emulated") return;
  if (!text.starts_with(kCuda)) refuse();
  static_cast<void>(parse_number<std::uint8_t>(text.substr(kCuda.size())));
}

ConfigField list(const char* name, std::vector<std::string> Config::*member, std::string help) {
  return {
      name,
      "a list of directories",
      std::move(help),
      JsonForm::List,
      [member](Config& config, std::string_view text) {
        std::vector<std::string> items;
        while (!text.empty()) {
          const std::size_t comma = std::min(text.find(','), text.size());
          if (comma == 0) refuse("one of them is empty");
          items.emplace_back(text.substr(0, comma));
          text.remove_prefix(std::min(comma + 1, text.size()));
        }
        config.*member = std::move(items);
      },
      [member](const Config& config) { return fmt::format("{}", fmt::join(config.*member, ",")); }};
}

constexpr const char* kScaleType = "a number from 2^-126 to 2^126";

double parse_scale(std::string_view text) {
  const auto value = parse_number<double>(text);
  if (!std::isfinite(value)) refuse("it is not finite");
  if (value < optim::LossScale::kSmallest || value > optim::LossScale::kLargest) refuse();
  return value;
}

ConfigField scale(const char* name, double Config::*member, std::string help) {
  return {name,
          kScaleType,
          std::move(help),
          JsonForm::Number,
          [=](Config& config, std::string_view text) { config.*member = parse_scale(text); },
          [member](const Config& config) { return fmt::format("{}", config.*member); }};
}

ConfigField loss_scale(const char* name, LossScale Config::*member, std::string help) {
  return {name,
          fmt::format("none, dynamic or {}", kScaleType),
          std::move(help),
          JsonForm::NumberOrText,
          [member](Config& config, std::string_view text) {
            LossScale scale;
            if (text == "dynamic") {
              scale.kind = LossScale::Kind::Dynamic;
            } else if (text != "none") {
              scale = {LossScale::Kind::Fixed, parse_scale(text)};
            }
            config.*member = scale;
          },
          [member](const Config& config) -> std::string {
            const LossScale& scale = config.*member;
            if (scale.kind == LossScale::Kind::Fixed) return fmt::format("{}", scale.value);
            return scale.kind == LossScale::Kind::None ? "none" : "dynamic";
          }};
}

ConfigField expert(ConfigField field) {
  field.expert = true;
  return field;
}

/// A size that is derived where it is not given.
ConfigField derived_bytes(const char* name, Bytes Config::*member, std::string help, Bytes least,
                          Bytes most) {
  ConfigField out = bytes(name, member, std::move(help), least, most);
  out.type += ", or 0";
  out.parse = [=](Config& config, std::string_view text) {
    config.*member = text == "0" ? 0 : parse_bytes_between(text, least, most);
  };
  return out;
}

std::vector<ConfigField> make_fields() {
  constexpr unsigned kMost = std::numeric_limits<unsigned>::max();
  constexpr unsigned kThreads = 1024;
  constexpr Bytes kLeastPiece = 4_KiB;
  constexpr Bytes kLeastStaging = 16_KiB;  // a block of gradients whose norm is taken, in fp32
  constexpr Bytes kMostPiece = 1024_GiB;
  constexpr double kMostSeconds = 1e9;  // what nanoseconds can count
  const Words<Placement> places = {{Placement::Auto, "auto"},
                                   {Placement::Device, "device"},
                                   {Placement::Host, "host"},
                                   {Placement::Nvme, "nvme"}};
  return {
      text_field(PAGODA_FIELD(device), "auto, cpu, cuda, cuda:N or emulated", check_device,
                 "Where operators run; auto is cuda where there is one, else cpu"),
      bytes(PAGODA_FIELD(device_budget),
            "Device memory for pages and gradient staging; 0: half of what is free"),
      expert(
          bytes(PAGODA_FIELD(gradient_staging),
                "Part of device_budget for gradients in flight; 0: an eighth. One that is larger "
                "leaves the "
                "device before backward goes on")),
      optional_bytes(PAGODA_FIELD(device_limit),
                     "Device memory for everything, activations and workspaces included"),
      bytes(PAGODA_FIELD(host_budget),
            "Host memory for everything placed there; 0: what is available, less a margin"),
      bytes(PAGODA_FIELD(activation_reserve),
            "Part of host_budget that a model's states leave to activations"),
      bytes(PAGODA_FIELD(nvme_budget),
            "Bytes of files for everything placed there; 0: half of what is free"),
      list(PAGODA_FIELD(nvme), "Directories for swap files, which are striped over them"),
      choice(PAGODA_FIELD(parameters), places,
             "Where parameters are placed when not in use; host spills to nvme, where that is set, "
             "when host_budget is full"),
      choice(PAGODA_FIELD(gradients), places,
             "Where gradients are placed until the update; host spills to nvme, where that is set, "
             "when host_budget is full"),
      choice(PAGODA_FIELD(optimizer_state), places,
             "Where master weights and moments are placed; host spills to nvme, where that is set, "
             "when host_budget is full"),
      whole(PAGODA_FIELD(zero), 0U, 3U,
            "ZeRO stage; sharded over ranks: 1 optimizer state, 2 gradients too, 3 parameters too"),
      choice(PAGODA_FIELD(initial),
             Words<Initial>{{Initial::Broadcast, "broadcast"}, {Initial::Check, "check"}},
             "What attach() does if ranks start with different values: broadcast rank 0's, or "
             "check and raise"),
      whole(PAGODA_FIELD(accumulation), 1U, kMost, "Micro-batches in a step"),
      choice(
          PAGODA_FIELD(gradient_dtype),
          Words<GradientType>{{GradientType::Parameter, "parameter"}, {GradientType::Fp32, "fp32"}},
          "The dtype in which gradients are accumulated"),
      choice(PAGODA_FIELD(reduction),
             Words<Reduction>{{Reduction::Mean, "mean"}, {Reduction::Sum, "sum"}},
             "How gradients are reduced over ranks; those of micro-batches are summed"),
      real(PAGODA_FIELD(clip), true,
           "Largest norm of all gradients together; 0: no clipping; inf: compute the norm at every "
           "step and never clip",
           std::numeric_limits<double>::infinity()),
      truth(
          PAGODA_FIELD(clip_ahead),
          "Let updates begin before the norm is known if the last step did not clip, and roll them "
          "back exactly if this one does, where all states are in host memory; takes room there "
          "for the optimizer's and for the parameters once more (14 bytes a parameter of AdamW in "
          "bf16), as far as there is any"),
      loss_scale(PAGODA_FIELD(loss_scale),
                 "What the loss is multiplied by; dynamic follows overflows (for fp16)"),
      scale(PAGODA_FIELD(loss_scale_initial), "Where a dynamic loss scale starts"),
      scale(PAGODA_FIELD(loss_scale_minimum), "Below which a dynamic loss scale never falls"),
      whole(PAGODA_FIELD(loss_scale_window), 1U, kMost,
            "Steps without overflow after which a dynamic loss scale doubles"),
      choice(PAGODA_FIELD(master),
             Words<Master>{{Master::Whole, "whole"}, {Master::Split, "split"}},
             "How the fp32 master of 16-bit parameters is kept; split: two bytes fewer, bf16 only"),
      choice(PAGODA_FIELD(moments),
             Words<MomentType>{{MomentType::Fp32, "fp32"}, {MomentType::Bf16, "bf16"}},
             "The dtype of the optimizer's moments"),
      whole(PAGODA_FIELD(seed), std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max(),
            "Seed for stochastic rounding"),
      truth(PAGODA_FIELD(early_updates),
            "Let updates begin during the last engine.backward() of a step, where nothing global "
            "(loss_scale, clip without clip_ahead) is needed"),
      expert(truth(PAGODA_FIELD(checksums), "Verify checksums of what is read from files")),
      expert(choice(PAGODA_FIELD(io_engine),
                    Words<io::EngineChoice>{{io::EngineChoice::Auto, "auto"},
                                            {io::EngineChoice::Uring, "uring"},
                                            {io::EngineChoice::Posix, "posix"}},
                    "How files are read and written; auto is uring where the kernel allows it")),
      expert(
          choice(PAGODA_FIELD(direct),
                 Words<io::Direct>{
                     {io::Direct::Auto, "auto"}, {io::Direct::On, "on"}, {io::Direct::Off, "off"}},
                 "Use O_DIRECT; auto is on where the file system allows it")),
      expert(truth(PAGODA_FIELD(prefetch), "Fetch pages before operators need them")),
      expert(whole(PAGODA_FIELD(fetch_threads), 1U, kThreads, "Threads that fetch pages")),
      expert(whole(PAGODA_FIELD(update_threads), 0U, kThreads,
                   "Threads that run the optimizer; 0: what the machine has left")),
      expert(derived_bytes(
          PAGODA_FIELD(update_chunk),
          "fp32 masters of one buffer, which has room for all that belongs to them: state is read, "
          "updated and written so much at a time; 0: 4 MiB, less where host_budget is small",
          kLeastPiece, kMostPiece)),
      expert(whole(
          PAGODA_FIELD(update_buffers), 2U, kThreads,
          "Chunks of optimizer state in memory at a time; fewer where they would take more than an "
          "eighth of host_budget, at least 4")),
      expert(derived_bytes(
          PAGODA_FIELD(staging),
          "Host memory of each fetch thread, between files, ranks and device; 0: 4 MiB, less where "
          "host_budget is small",
          kLeastStaging, kMostPiece)),
      expert(bytes(
          PAGODA_FIELD(lookup_in_place),
          "An embedding at least so large is read row by row where it lies in host memory, its "
          "rows updated before the rest; 0: always fetched whole")),
      expert(bytes(PAGODA_FIELD(bucket), "Gradients that ranks reduce at a time", kLeastPiece,
                   kMostPiece)),
      real(PAGODA_FIELD(timeout), false,
           "Seconds after which a silent rank is taken for lost, and one that does nothing while "
           "others wait for it is an error; the same on all ranks",
           kMostSeconds),
      real(PAGODA_FIELD(join_timeout), false,
           "Seconds in which all ranks must have started, whatever timeout is; after timeout of "
           "them a warning names a rank that has not",
           kMostSeconds),
      expert(real(PAGODA_FIELD(heartbeat), true,
                  "Seconds between heartbeats of a rank, the same on all; "
                  "0: a twelfth of timeout, at most 5",
                  kMostSeconds)),
      expert(truth(PAGODA_FIELD(check_order),
                   "Check that every access of device memory is ordered; slow")),
      text_field(PAGODA_FIELD(trace), "a path", nullptr,
                 "File for a timeline of events, for ui.perfetto.dev; empty: none"),
      text_field(
          PAGODA_FIELD(trace_steps), "a step or a range of steps",
          [](std::string_view text) { (void)engine::parse_step_range(text); },
          "Steps that the trace shows"),
  };
}

#undef PAGODA_FIELD

constexpr std::string_view kOptimizerState = "optimizer_state";
constexpr std::string_view kOldOptimizerState = "optimizer";

/// A word of the field that others call `text`; empty: none is.
std::string_view meant_by(const ConfigField& field, std::string_view text) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"cpu", "host"}, {"ram", "host"},   {"disk", "nvme"},  {"ssd", "nvme"},
      {"gpu", "cuda"}, {"gpu", "device"}, {"cuda", "device"}};
  if (field.form != JsonForm::Text) return {};
  for (const auto& [theirs, ours] : kNames) {
    if (text != theirs) continue;
    try {
      Config unused;
      field.parse(unused, ours);
      return ours;
    } catch (const UserError&) {  // not a word of this field
    }
  }
  return {};
}

}  // namespace

const std::vector<ConfigField>& config_fields() {
  static const std::vector<ConfigField> fields = make_fields();
  return fields;
}

const ConfigField& config_field(std::string_view name) {
  if (name == kOldOptimizerState) {
    static std::once_flag told;
    std::call_once(told, [] {
      log::warn("config",
                "the key 'optimizer' has become 'optimizer_state', which says what it "
                "places: 'optimizer' is the algorithm, an argument of attach()");
    });
    name = kOptimizerState;
  }
  std::vector<std::string> names;
  for (const ConfigField& field : config_fields()) {
    if (field.name == name) return field;
    names.push_back(field.name);
  }
  const auto near = nearest_word(name, names);
  throw UserError(
      near ? fmt::format("there is no key '{}'; did you mean '{}'?", name, *near)
           : fmt::format("there is no key '{}'; pagoda.config_keys() and docs/config.md list all",
                         name));
}

void set_field(Config& config, const ConfigField& field, std::string_view text,
               std::string_view shown) {
  try {
    field.parse(config, text);
  } catch (const UserError& error) {
    refuse_value(field, shown, error.message(), meant_by(field, text));
  }
}

void set_field(Config& config, const ConfigField& field, std::string_view text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const bool bare = text == "true" || text == "false" ||
                    (!text.empty() && std::from_chars(text.data(), end, number).ptr == end);
  set_field(config, field, text, bare ? std::string(text) : fmt::format("'{}'", text));
}

void refuse_value(const ConfigField& field, std::string_view shown, std::string_view reason,
                  std::string_view instead) {
  throw UserError(fmt::format("{} = {} is not allowed: {}{}expected {}{}", field.name, shown,
                              reason, reason.empty() ? "" : "; ", field.type,
                              instead.empty() ? "" : fmt::format("; did you mean '{}'?", instead)));
}

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <fstream>

#include <gtest/gtest.h>
#include <unistd.h>

#include "pagoda/base/error.h"

namespace tiny_gpt {
namespace {

namespace fs = std::filesystem;

/// A folder that goes away with the test.
class TextTest : public testing::Test {
 protected:
  TextTest() {
    std::string pattern = (fs::temp_directory_path() / "tiny_gpt_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~TextTest() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& bytes) {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  fs::path folder_;
};

TEST_F(TextTest, TakesTextInAFixedOrderAndPassesTheRestOver) {
  write("b/two", "second ");
  write("a", "first ");
  write("z", "last");
  write("binary", std::string("\x7f"
                              "ELF\0\1",
                              6));
  write("empty", "");
  fs::create_symlink(folder_ / "a", folder_ / "link");
  const Text text = Text::load(folder_, 1 << 20);
  EXPECT_EQ(text.bytes(), "first second last");
  EXPECT_EQ(text.files(), 3U);
}

TEST_F(TextTest, KeepsToTheLimit) {
  write("one/a", std::string(100, 'a'));
  write("two/b", std::string(100, 'b'));
  const std::vector<fs::path> places{folder_ / "one", folder_ / "missing", folder_ / "two"};
  const Text text = Text::collect(places, 130);
  EXPECT_EQ(text.bytes(), std::string(100, 'a') + std::string(30, 'b'));
  EXPECT_EQ(Text::collect(places, 50).bytes(), std::string(50, 'a'));
  EXPECT_EQ(Text::collect(places, 50).files(), 1U);
}

TEST_F(TextTest, NoTextIsTheCallersError) {
  EXPECT_THROW(Text::load(folder_ / "missing", 100), pagoda::UserError);
  EXPECT_THROW(Text::load(folder_, 100), pagoda::UserError);
  const std::vector<fs::path> places{folder_ / "missing"};
  try {
    Text::collect(places, 100);
    FAIL() << "no error";
  } catch (const pagoda::UserError& error) {
    EXPECT_NE(error.message().find("--text"), std::string::npos) << "says what to do";
    EXPECT_NE(error.message().find("missing"), std::string::npos) << "names the place";
  }
}

TEST_F(TextTest, ABatchIsPiecesOfTheTextWithTheirSuccessors) {
  std::string bytes;
  for (int i = 0; i < 251; ++i) bytes += static_cast<char>(i + 1);
  const Text text = Text::load(write("bytes", bytes), 1 << 20);
  const Batch batch = text.batch(5, 16, 7);
  ASSERT_EQ(batch.inputs.size(), 80U);
  ASSERT_EQ(batch.targets.size(), 80U);
  for (std::size_t i = 0; i < 80; ++i) {
    EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
    EXPECT_GE(batch.inputs[i], 1);
    if (i % 16 != 0) {
      EXPECT_EQ(batch.inputs[i], batch.inputs[i - 1] + 1);
    }
  }
  EXPECT_EQ(text.batch(5, 16, 7).inputs, batch.inputs);
  EXPECT_NE(text.batch(5, 16, 8).inputs, batch.inputs);
}

TEST_F(TextTest, TheShortestTextThatWorks) {
  const Text text = Text::load(write("four", "abcd"), 100);
  EXPECT_EQ(text.batch(1, 3, 1).targets, (std::vector<std::int64_t>{'b', 'c', 'd'}));
  EXPECT_THROW(text.batch(1, 4, 1), pagoda::UserError);
}

TEST(Indented, MovesEveryLineAndCutsLongOnes) {
  EXPECT_EQ(indented("ab\n\ncd"), "  ab\n\n  cd\n");
  EXPECT_EQ(indented(std::string(78, 'x')), "  " + std::string(77, 'x') + "\n  x\n");
  EXPECT_EQ(indented(std::string(77, 'x') + "\ny"), "  " + std::string(77, 'x') + "\n  y\n");
  EXPECT_EQ(indented(""), "");
}

TEST(Printable, NothingReachesTheTerminal) {
  EXPECT_EQ(printable("a\tb\n\x1b[2J\xff~"), "a\tb\n?[2J?~");
}

}  // namespace
}  // namespace tiny_gpt

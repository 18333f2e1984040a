// Token IDs become JSON text, as Python's Detokenizer would write it.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pdd {

// The JSON text of every token; empty for those that only Python can write.
struct Vocabulary {
  std::vector<uint32_t> offsets;
  std::string data;

  std::string_view text(uint32_t id) const {
    if (size_t(id) + 1 >= offsets.size()) return {};
    return std::string_view(data).substr(offsets[id], offsets[id + 1] - offsets[id]);
  }
};

// Where a text stands in its last UTF-8 character: how many bytes are to come, and which the next may be.
class Utf8 {
 public:
  bool whole() const { return missing_ == 0; }

  // False if the byte cannot follow.
  bool take(unsigned char byte) {
    if (missing_ > 0) {
      if (byte < low_ || byte > high_) return false;
      return expect(missing_ - 1, 0x80, 0xBF);
    }
    if (byte < 0x80) return true;
    if (byte >= 0xC2 && byte <= 0xDF) return expect(1, 0x80, 0xBF);
    if (byte == 0xE0) return expect(2, 0xA0, 0xBF);  // less would be overlong
    if (byte == 0xED) return expect(2, 0x80, 0x9F);  // more would be a surrogate
    if (byte >= 0xE1 && byte <= 0xEF) return expect(2, 0x80, 0xBF);
    if (byte == 0xF0) return expect(3, 0x90, 0xBF);  // less would be overlong
    if (byte >= 0xF1 && byte <= 0xF3) return expect(3, 0x80, 0xBF);
    if (byte == 0xF4) return expect(3, 0x80, 0x8F);  // more is beyond Unicode
    return false;
  }

 private:
  bool expect(int missing, unsigned char low, unsigned char high) {
    missing_ = missing;
    low_ = low;
    high_ = high;
    return true;
  }

  int missing_ = 0;
  unsigned char low_ = 0x80;
  unsigned char high_ = 0xBF;
};

// The text of an answer, token by token. A token that ends inside a character gives no text until the
// character is whole.
class Text {
 public:
  // Appends the token's text to `out`; false, and nothing has happened to `this`, if Python has to write it.
  bool feed(const Vocabulary& vocabulary, uint32_t id, std::string& out) {
    std::string_view token = vocabulary.text(id);
    if (token.empty()) return false;
    Utf8 utf8 = utf8_;
    for (char byte : token)
      if (!utf8.take(static_cast<unsigned char>(byte))) return false;
    utf8_ = utf8;
    if (!utf8_.whole()) {
      held_.append(token);
      ++held_tokens_;
      return true;
    }
    out.append(held_).append(token);
    held_.clear();
    held_tokens_ = 0;
    return true;
  }

  uint32_t held_tokens() const { return held_tokens_; }

 private:
  Utf8 utf8_;
  std::string held_;
  uint32_t held_tokens_ = 0;
};

}  // namespace pdd

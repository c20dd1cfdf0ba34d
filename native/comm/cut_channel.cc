#include <utility>

#include "comm/cut.h"

namespace elaswave::comm {
namespace {

class CutChannel final : public Channel {
 public:
  CutChannel(std::unique_ptr<Channel> channel, const Cut& cut) : below_(std::move(channel)), cut_(cut) {}

  std::ptrdiff_t read(void* data, std::size_t bytes) override { return cut_.lasts() ? 0 : below_->read(data, bytes); }
  void expect(std::size_t bytes) override { below_->expect(bytes); }
  std::ptrdiff_t write(const iovec* parts, int count) override {
    return cut_.lasts() ? 0 : below_->write(parts, count);
  }
  void watch(int epoll, std::uint64_t number) override { below_->watch(epoll, number); }
  bool arm(bool for_read, bool for_write) override {
    const bool lasts = cut_.lasts();
    return below_->arm(for_read && !lasts, for_write && !lasts);
  }
  void disarm() override { below_->disarm(); }
  void on_event() override { below_->on_event(); }
  bool is_silent(std::chrono::steady_clock::time_point now, bool look_afresh) override {
    return below_->is_silent(now, look_afresh);
  }
  void finish_writing() override {
    if (!cut_.lasts()) below_->finish_writing();
  }
  std::string trouble() const override { return below_->trouble(); }
  int fd() const override { return below_->fd(); }
  LinkKind kind() const override { return below_->kind(); }

 private:
  const std::unique_ptr<Channel> below_;
  const Cut& cut_;
};

}  // namespace

std::unique_ptr<Channel> make_cut_channel(std::unique_ptr<Channel> channel, const Cut& cut) {
  return std::make_unique<CutChannel>(std::move(channel), cut);
}

}  // namespace elaswave::comm

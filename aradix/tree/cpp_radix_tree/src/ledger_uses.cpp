// What a ledger tells the record of uses, under the policy that learns.
#include "ledger.hpp"

namespace aradix {

void Ledger::count_hits(Handle handle, int64_t num_hits) {
    if (reuse_)
        reuse_->hit(at(handle), num_hits, tick_);
    at(handle).hit_count += num_hits;
}

void Ledger::recall(Handle handle, const uint8_t *tokens) {
    if (!reuse_)
        return;
    const std::vector<ReuseRecord::Run> &runs =
        reuse_->welcome(at(handle), tokens, at(at(handle).parent).fingerprint, tick_);
    for (size_t run = 0; run + 1 < runs.size(); ++run) {
        Handle head = split(handle, static_cast<size_t>(runs[run].num_tokens) * item_bytes_, runs[run].fingerprint);
        at(head).past_uses = runs[run].uses;
        ReuseRecord::classify(at(head));
    }
    at(handle).past_uses = runs.back().uses;
    ReuseRecord::classify(at(handle));
}

}  // namespace aradix

// The plain case of what a lease does, one call a step: nothing is fenced or marked, no gate is met, there are slots
// enough, and the caller broke no rule. In any other case nothing is changed and the answer is no: the shell then goes the
// long way, by the steps in tree.cpp, and says what is wrong. Both ways come to the same.
#include <algorithm>
#include <stdexcept>

#include "hold.hpp"
#include "tree.hpp"

namespace aradix {
namespace {

// Room for pages at the end of a hold, taken back unless something came of it.
class Room {
public:
    Room(Hold &hold, int64_t num_pages) : pages(hold.extend(num_pages)), hold_(hold), num_pages_(num_pages) {}
    ~Room() {
        if (!kept_)
            hold_.unextend(num_pages_);
    }
    Room(const Room &) = delete;
    Room &operator=(const Room &) = delete;

    void keep() { kept_ = true; }

    int32_t *const pages;

private:
    Hold &hold_;
    int64_t num_pages_;
    bool kept_ = false;
};

}  // namespace

bool Tree::enter_hold(Hold &hold) {
    Step step(*this);
    if (has_marks() || hold.fences() || hold.node_id != 0)
        return false;
    Key key = read_key(hold.key, hold.limit);
    Handle root = find_root(key.name_space);
    if (root == kNone)
        root = new_root(key.name_space);
    Place place = enter(key, root, false);
    if (place.gate != 0)
        return false;
    Handle node = arrive(place);
    size_t from = touch_and_lock(node);
    hold.num_matched = hold.published = hold.committed = items(at(node).depth);
    node = merge_path(node, from);
    hold.node_id = at(node).id;
    if (records_events_)
        __builtin_prefetch(&at(node).pages);  // what is published goes on behind them
    return true;
}

std::optional<Growth> Tree::grow_hold(Hold &hold, PageTable &table, int64_t num_tokens, int state) {
    Step step(*this);
    int64_t fresh = hold.fresh_slots_for(num_tokens);
    int64_t evicted = 0;
    if (fresh != 0) {
        int64_t missing = fresh - table.free_slots();
        if (has_marks() || hold.fences() || !hold.has_pages() || !table.quiet || missing > evictable_tokens)
            return std::nullopt;
        int64_t wanted = fresh / hold.page_size;
        Room room(hold, wanted);
        spare_pages_.clear();
        int64_t given = missing > 0 ? evict_pages(missing, room.pages, wanted) : 0;
        evicted = given * hold.page_size;
        // What is evicted would lie on top of the free pages, and be the first to be taken again: it changes hands.
        int64_t passed_on = std::min(given, wanted);
        auto num_passed_on = static_cast<size_t>(passed_on);
        bool held = table.has_all(room.pages, num_passed_on, state);
        bool taken = held && table.take_pages(room.pages + passed_on, wanted - passed_on, state);
        if (!table.give_pages(spare_pages_.data(), spare_pages_.size(), state) || !held)
            throw std::runtime_error("the tree let go of slots that its pool does not hold");
        if (!taken) {
            // Somebody on another thread was quicker, while an event was told.
            table.give_pages(room.pages, num_passed_on, state);
            return Growth{-evicted, evicted, false};
        }
        room.keep();
    }
    hold.num_own += num_tokens;
    ++hold.version;
    if (!hold.counted && !hold.resume && hold.num_matched != 0 && hold.node_id != 0)
        count_hit(node_named(hold.node_id));
    return Growth{fresh - evicted, evicted, true};
}

std::optional<Published> Tree::publish_hold(Hold &hold, PageTable &table, nb::handle view, int state) {
    Step step(*this);
    if (has_marks() || hold.fences() || !hold.has_pages() || !table.quiet || !hold.store || !hold.counted ||
        hold.node_id == 0)
        return std::nullopt;
    Key key = read_key(view), before = read_key(hold.key);
    size_t size = key.size, known = before.size;
    if (!key.name_space.is(before.name_space) || std::min(size, known) % item_bytes_ != 0 ||
        std::memcmp(key.tokens, before.tokens, std::min(size, known)) != 0)
        return std::nullopt;
    int64_t num_tokens = items(size), start = hold.published;
    if (num_tokens < hold.committed || num_tokens > hold.num_tokens())
        return std::nullopt;
    if (items(key.stop) <= start) {  // a page has to be full
        hold.committed = num_tokens;
        if (size > known)
            hold.key = nb::borrow(view);
        return Published{start, start, records_.ref(hold.node_id, start), nb::none()};
    }
    Handle origin = node_named(hold.node_id);
    if (at(origin).detached || items(at(origin).depth) != start)
        return std::nullopt;
    at(origin).pages.fetch();  // comes while tokens are compared
    Place place = descend(key, origin, kPending);
    if (place.gate != 0 || !table.quiet)  // a thread may have retired slots while a long prompt was compared
        return std::nullopt;
    SlotRun fresh = hold.take_front_run(items(key.stop) - start);
    SlotRun spare = fresh.split_front(count_of(depth_of(place) - at(origin).depth), page_size_);
    nb::object no_ready;
    Grown grown = grow(origin, key, std::move(fresh), key.stop, place, saturated(hold.priority), no_ready);
    if (grown.node != origin) {
        lock(grown.node, origin);
    }
    hold.node_id = at(merge_path(grown.node, grown.from)).id;
    int64_t held = items(grown.held), end = items(grown.end);
    hold.committed = num_tokens;
    hold.published = end;
    if (size > known)
        hold.key = nb::borrow(view);
    nb::object duplicates = nb::none();
    if (held > start) {
        auto count = static_cast<size_t>(held - start);
        int64_t *out = nullptr;
        duplicates = new_slots(count, out);
        spare.copy_to(out, 0, count, page_size_);
        if (!table.give_pages(spare.pages(), spare.num_pages(), state))
            throw std::runtime_error("a lease held slots that its pool does not hold");
    }
    return Published{held, end, records_.ref(hold.node_id, end), duplicates};
}

std::optional<int64_t> Tree::leave_hold(Hold &hold, PageTable &table, int state) {
    Step step(*this);
    if (has_marks() || hold.fences() || !hold.has_pages() || !table.quiet || hold.waiting)
        return std::nullopt;
    nb::list freed;
    if (hold.node_id != 0) {
        Handle node = node_named(hold.node_id);
        if (at(node).detached)
            return std::nullopt;
        hold.node_id = 0;
        freed = unpin_node(node, true);
    }
    int64_t count = hold.num_own_slots();
    const SlotRun &own = hold.own_run();
    if (count != 0 && !table.give_pages(own.pages(), own.num_pages(), state))
        throw std::runtime_error("a lease held slots that its pool does not hold");
    hold.drop_all();
    return count;
}

nb::object Tree::slots_of_hold(const Hold &hold) {
    Step step(*this);
    auto published = static_cast<size_t>(hold.published), own = static_cast<size_t>(hold.num_own);
    int64_t *out = nullptr;
    nb::object slots = new_slots(published + own, out);
    if (published != 0)
        copy_slots(node_named(hold.node_id), 0, published * item_bytes_, out);
    hold.copy_own(out + published, hold.num_own);
    return slots;
}

}  // namespace aradix

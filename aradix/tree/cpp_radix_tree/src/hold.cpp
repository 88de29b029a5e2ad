#include "hold.hpp"

#include "python_records.hpp"

namespace aradix {

Hold::Hold(int64_t order_, nb::object key_, nb::object given_, int64_t limit_, nb::object priority_, bool store_,
           bool resume_, nb::object stream_, nb::object opened_in_, int64_t opened_near_, double opened_when_)
    : order(order_), limit(limit_), opened_near(opened_near_), opened_when(opened_when_), key(std::move(key_)),
      given(std::move(given_)), priority(std::move(priority_)), stream(std::move(stream_)), used(nb::none()),
      task(nb::none()), opened_in(std::move(opened_in_)), store(store_), resume(resume_) {
    num_opened = static_cast<int64_t>(nb::len(given));
}

int64_t Hold::fresh_slots_for(int64_t num_tokens, int64_t page_size) const {
    int64_t missing = num_own + num_tokens - num_own_slots();
    return missing > 0 ? (missing + page_size - 1) / page_size * page_size : 0;
}

nb::object Hold::own() const {
    int64_t *out = nullptr;
    auto count = static_cast<size_t>(num_own_slots());
    nb::object copy = new_slots(count, out);
    std::copy(own_data(), own_data() + count, out);
    return copy;
}

int64_t *Hold::extend(int64_t num_slots) {
    size_t begin = slots_.size();
    slots_.resize(begin + static_cast<size_t>(num_slots));
    return slots_.data() + begin;
}

void Hold::add(nb::handle slots_object, int64_t num_tokens) {
    Slots slots(slots_object);
    num_own += num_tokens;
    ++version;
    slots_.insert(slots_.end(), slots.data, slots.data + slots.size);
}

void Hold::take_front(int64_t num_slots) {
    if (num_slots < 0 || num_slots > num_own_slots())
        throw nb::value_error("fewer slots are held");
    start_ += static_cast<size_t>(num_slots);
    num_own -= num_slots;
    ++version;
    shrink();
}

nb::object Hold::cut(int64_t keep_own, int64_t page_size) {
    int64_t keep = (keep_own + page_size - 1) / page_size * page_size;
    num_own = keep_own;
    ++version;
    int64_t *out = nullptr;
    int64_t count = num_own_slots() - keep;
    if (count <= 0)
        return new_slots(0, out);
    nb::object freed = new_slots(static_cast<size_t>(count), out);
    std::copy(slots_.end() - count, slots_.end(), out);
    slots_.resize(slots_.size() - static_cast<size_t>(count));
    shrink();
    return freed;
}

void Hold::drop_all() {
    num_own = 0;
    ++version;
    std::vector<int64_t>().swap(slots_);
    start_ = 0;
}

// Keeps no block of which little is in use.
void Hold::shrink() {
    if (start_ == slots_.size()) {
        slots_.clear();
        start_ = 0;
    } else if (start_ > 64 && start_ > slots_.size() / 2) {
        slots_.erase(slots_.begin(), slots_.begin() + static_cast<std::ptrdiff_t>(start_));
        start_ = 0;
    }
    if (slots_.capacity() > 64 && slots_.size() < slots_.capacity() / 4)
        slots_.shrink_to_fit();
}

int Hold::traverse(visitproc visit, void *arg) const {
    for (PyObject *object : {key.ptr(), given.ptr(), priority.ptr(), stream.ptr(), used.ptr(), task.ptr(), opened_in.ptr()})
        Py_VISIT(object);
    return 0;
}

void Hold::clear() {
    // What goes may run Python, which must find a hold that is whole.
    nb::object gone[] = {std::move(stream), std::move(used), std::move(task)};
    stream = used = task = nb::none();
}

}  // namespace aradix

#include "hold.hpp"

#include "python_records.hpp"

namespace aradix {

Hold::Hold(int64_t order_, nb::object key_, nb::object given_, int64_t limit_, nb::object priority_, bool store_,
           bool resume_, nb::object stream_, nb::object opened_in_, int64_t opened_near_, double opened_when_,
           int64_t page_size_)
    : order(order_), limit(limit_), opened_near(opened_near_), page_size(page_size_), opened_when(opened_when_),
      key(std::move(key_)), given(std::move(given_)), priority(std::move(priority_)), stream(std::move(stream_)),
      used(nb::none()), task(nb::none()), opened_in(std::move(opened_in_)), store(store_), resume(resume_) {
    if (page_size < 1)
        throw nb::value_error("a page has at least one slot");
    num_opened = static_cast<int64_t>(nb::len(given));
}

int64_t Hold::fresh_slots_for(int64_t num_tokens) const {
    int64_t missing = num_own + num_tokens - num_own_slots();
    return missing > 0 ? (missing + page_size - 1) / page_size * page_size : 0;
}

nb::object Hold::own() const {
    int64_t *out = nullptr;
    nb::object copy = new_slots(static_cast<size_t>(num_own_slots()), out);
    copy_own(out, num_own_slots());
    return copy;
}

void Hold::add(nb::handle slots_object, int64_t num_tokens) {
    Slots slots(slots_object);
    num_own += num_tokens;
    ++version;
    slots_.append(slots.data, slots.size, page_items());
}

void Hold::take_front(int64_t num_slots) {
    if (num_slots < 0 || num_slots > num_own_slots())
        throw nb::value_error("fewer slots are held");
    take_front_run(num_slots);
}

SlotRun Hold::take_front_run(int64_t num_slots) {
    num_own -= num_slots;
    ++version;
    SlotRun front = slots_.split_front(static_cast<size_t>(num_slots), page_items());
    for (SlotRun *part : {&front, &slots_})
        part->fit();  // a node grows no more, and who decodes has little in hand
    return front;
}

nb::object Hold::cut(int64_t keep_own) {
    int64_t keep = (keep_own + page_size - 1) / page_size * page_size;
    num_own = keep_own;
    ++version;
    int64_t *out = nullptr;
    int64_t count = num_own_slots() - keep;
    if (count <= 0)
        return new_slots(0, out);
    nb::object freed = new_slots(static_cast<size_t>(count), out);
    slots_.copy_to(out, static_cast<size_t>(keep), static_cast<size_t>(count), page_items());
    slots_.drop_back(static_cast<size_t>(count), page_items());
    return freed;
}

void Hold::drop_all() {
    num_own = 0;
    ++version;
    slots_ = SlotRun();
}

int Hold::traverse(visitproc visit, void *arg) const {
    for (PyObject *object :
         {key.ptr(), given.ptr(), priority.ptr(), stream.ptr(), used.ptr(), task.ptr(), opened_in.ptr()})
        Py_VISIT(object);
    return 0;
}

void Hold::clear() {
    // What goes may run Python, which must find a hold that is whole.
    nb::object gone[] = {std::move(stream), std::move(used), std::move(task)};
    stream = used = task = nb::none();
}

}  // namespace aradix

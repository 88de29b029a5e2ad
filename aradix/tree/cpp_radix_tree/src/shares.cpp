#include "shares.hpp"

#include <stdexcept>

namespace aradix {

Shares::Shares(const Records &records, nb::handle shares) : records_(records), by_tenant_(nb::dict()) {
    for (nb::handle share : shares) {
        nb::object tenant = nb::borrow(share[0]);
        shares_.push_back(Share{tenant, nb::cast<int64_t>(share[1])});
    }
    for (size_t share = 0; share + 1 < shares_.size(); ++share)
        nb::cast<nb::dict>(by_tenant_)[shares_[share].tenant] = share;
}

uint32_t Shares::of(nb::handle name_space) const {
    if (shares_.empty())
        return 0;
    nb::object tenant = nb::steal(PyObject_GetAttr(name_space.ptr(), records_.name_tenant.ptr()));
    if (!tenant.is_valid())
        throw nb::python_error();
    PyObject *known = PyDict_GetItemWithError(by_tenant_.ptr(), tenant.ptr());
    if (known == nullptr && PyErr_Occurred())
        throw nb::python_error();
    return known == nullptr ? static_cast<uint32_t>(shares_.size() - 1) : nb::cast<uint32_t>(nb::handle(known));
}

Share &Shares::at(uint32_t share) {
    if (share >= shares_.size())
        throw std::out_of_range("no such share");
    return shares_[share];
}

// Changes one of a share's numbers, and ranks the share if it has something to give.
void Shares::change(uint32_t number, int64_t &what, int64_t value) {
    what = value;
    const Share &share = shares_[number];
    if (share.num_filed != 0)
        ranked_.put(number, Rank{-share.excess(), 0}, number);
    else
        ranked_.discard(number);
}

nb::list Shares::views() const {
    nb::list views;
    for (const Share &share : shares_)
        append_to(views, records_.make(records_.share_view, share.tenant, integer(share.claim), integer(share.cached),
                                       integer(share.leased), integer(share.evicted)));
    return views;
}

int Shares::traverse(visitproc visit, void *arg) {
    Py_VISIT(by_tenant_.ptr());
    for (const Share &share : shares_)
        Py_VISIT(share.tenant.ptr());
    return 0;
}

void Shares::clear() {
    nb::object by_tenant = std::move(by_tenant_);
    by_tenant_ = nb::object();
    std::vector<nb::object> tenants;
    for (Share &share : shares_) {
        tenants.push_back(std::move(share.tenant));
        share.tenant = nb::object();
    }
}

}  // namespace aradix

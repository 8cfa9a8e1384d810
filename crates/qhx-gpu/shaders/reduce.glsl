// Sums and maxima over a workgroup: with subgroup operations where the device has them, else in shared memory.
shared float reduced[GROUP];

float group_sum(float x) {
    uint i = gl_LocalInvocationID.x;
#ifdef SUBGROUPS
    x = subgroupAdd(x);
    if (gl_NumSubgroups == 1u) return x;
    if (subgroupElect()) reduced[gl_SubgroupID] = x;
    barrier();
    float sum = 0.0;
    for (uint s = gl_SubgroupInvocationID; s < gl_NumSubgroups; s += gl_SubgroupSize) sum += reduced[s];
    sum = subgroupAdd(sum);
    barrier();
    return sum;
#else
    reduced[i] = x;
    barrier();
    for (uint half_size = GROUP / 2u; half_size > 0u; half_size /= 2u) {
        if (i < half_size) reduced[i] += reduced[i + half_size];
        barrier();
    }
    float sum = reduced[0];
    barrier();
    return sum;
#endif
}

float group_max(float x) {
    uint i = gl_LocalInvocationID.x;
#ifdef SUBGROUPS
    x = subgroupMax(x);
    if (gl_NumSubgroups == 1u) return x;
    if (subgroupElect()) reduced[gl_SubgroupID] = x;
    barrier();
    float most = reduced[0];
    for (uint s = gl_SubgroupInvocationID; s < gl_NumSubgroups; s += gl_SubgroupSize) most = max(most, reduced[s]);
    most = subgroupMax(most);
    barrier();
    return most;
#else
    reduced[i] = x;
    barrier();
    for (uint half_size = GROUP / 2u; half_size > 0u; half_size /= 2u) {
        if (i < half_size) reduced[i] = max(reduced[i], reduced[i + half_size]);
        barrier();
    }
    float most = reduced[0];
    barrier();
    return most;
#endif
}

-- The first two steps of claim_keys, which inlines them: walk over the keys, and choose jobs of their key queues.

-- Long, since the first key of the ring and those after it are looked at by the same conditions, each in its own query.
create or replace function penstock.walk_keys(
    p_name text,
    p_slots integer[],
    p_after_key text,
    p_midway boolean,
    p_resuming boolean,
    p_longest integer,
    p_room integer,
    p_key_concurrency integer,
    p_held_keys jsonb,
    p_keys_paused boolean,
    p_moment timestamptz,
    p_sealed boolean,
    p_keys text[]
)
returns table (
    place integer, key text, step integer, found integer, startable boolean, ready boolean, due timestamptz, head tid, head_seq bigint,
    alive boolean, lacks text
)
language sql
stable
as $$
    with recursive ring as (
        select 1 as place, case when p_midway then p_after_key else '' end as key, 0 as step,
            coalesce(head.startable, false)::integer as found, coalesce(head.startable, false) as startable, coalesce(head.ready, false) as ready,
            null::timestamptz as due, head.ctid as head, head.seq as head_seq, head.alive, null::text as lacks
        from (select) as start
        left join lateral (
            select
                job.ctid, job.seq, job.ready, job.alive,
                (job.ready or p_key_concurrency > 1 or p_held_keys ? job.key)
                    and not (
                        p_keys_paused
                        and exists (select from penstock.paused_keys as paused where paused.name = p_name and paused.key = job.key)
                    ) as startable
            from (
                select
                    first.ctid, first.key, first.seq,
                    first.status = 'queued' and first.run_after <= p_moment
                        and (not p_sealed or penstock.has_key_for(first.data, first.message, p_keys)) as ready,
                    first.expires_at is null or first.expires_at > p_moment as alive
                from penstock.queued_jobs as first
                where p_resuming
                    and first.name = p_name
                    and first.slot = p_slots[1]
                    and first.seq is not null
                    and first.key collate "C" = p_after_key
                order by first.seq
                limit 1
            ) as job
        ) as head on true
        union all
        select
            ring.place + (next.key is null)::integer,
            coalesce(next.key, ''),
            ring.step + 1,
            ring.found + coalesce(next.startable, false)::integer,
            coalesce(next.startable, false),
            next.ready,
            next.due,
            next.head,
            next.head_seq,
            next.alive,
            next.lacks
        from ring
        left join lateral (
            select
                job.key, job.ready, job.due, job.ctid as head, job.seq as head_seq, job.alive,
                -- Where the status and the time let it start, only its key of encryption can be missing.
                case
                    when job.data is not null and not job.ready
                    then penstock.key_of_envelope(coalesce(penstock.payload(job.message), job.data))
                end as lacks,
                (job.ready or p_key_concurrency > 1 or p_held_keys ? job.key)
                    and not (
                        p_keys_paused
                        and exists (select from penstock.paused_keys as paused where paused.name = p_name and paused.key = job.key)
                    ) as startable
            from (
                select
                    head.ctid, head.key, head.seq,
                    head.status = 'queued' and head.run_after <= p_moment
                        and (not p_sealed or penstock.has_key_for(head.data, head.message, p_keys)) as ready,
                    case when head.status = 'queued' then head.run_after end as due,
                    case when p_sealed and head.status = 'queued' and head.run_after <= p_moment then head.data end as data,
                    head.message,
                    head.expires_at is null or head.expires_at > p_moment as alive
                from penstock.queued_jobs as head
                where head.name = p_name
                    and head.slot = p_slots[ring.place]
                    and head.seq is not null
                    and head.key collate "C" > ring.key
                    and not (
                        p_midway and ring.place = cardinality(p_slots)
                        and (head.key collate "C" > p_after_key or (p_resuming and head.key collate "C" = p_after_key))
                    )
                order by head.key collate "C", head.seq
                limit 1
            ) as job
        ) as next on true
        where ring.place <= cardinality(p_slots)
            and ring.found < p_room
            and ring.step < p_longest
    )
    select
        ring.place, ring.key, ring.step, ring.found, ring.startable, ring.ready, ring.due, ring.head, ring.head_seq, ring.alive,
        ring.lacks
    from ring
$$;
comment on function penstock.walk_keys(
    text, integer[], text, boolean, boolean, integer, integer, integer, jsonb, boolean, timestamptz, boolean, text[]
) is
    'Part of claim_keys: the keys of the slots in the order of the ring, each with the first job of its key queue, until p_room of them can start jobs or p_longest steps are done; a paused key cannot. place: of the slot in p_slots. ready: whether the first job itself can start, whatever worker holds jobs of the key. Step 0 is p_after_key when p_resuming. p_sealed: whether the pool may have encrypted documents; p_keys: as in claim_keys. lacks: the key of encryption for which alone the first job waits.';

-- Long, since it looks at the same key queues twice: by one probe where a key gets one job, as a window where it gets more.
create or replace function penstock.choose_of_keys(
    p_name text,
    p_slots integer[],
    p_after_key text,
    p_midway boolean,
    p_turn_left integer,
    p_longest integer,
    p_room integer,
    p_whole_turns boolean,
    p_depth integer,
    p_key_concurrency integer,
    p_held_keys jsonb,
    p_keys_paused boolean,
    p_key_rate_limit integer,
    p_key_rate_period interval,
    p_moment timestamptz,
    p_sealed boolean,
    p_keys text[]
)
returns table (job tid, turn integer, nth bigint, at_slot integer, at_key text, due_in_s double precision, turn_left integer, weights text, lacking text)
language sql
stable
as $$
    with ring as materialized (
        select walked.*
        from penstock.walk_keys(
            p_name, p_slots, p_after_key, p_midway, p_turn_left > 0, p_longest, p_room, p_key_concurrency, p_held_keys, p_keys_paused,
            p_moment, p_sealed, p_keys
        ) as walked
    ),
    turns as (
        select
            ring.step as turn, p_slots[ring.place] as slot, ring.key, heavy.weight,
            -- No more jobs of a key than are needed to fill the room.
            least(p_depth, (p_room - 1) / count(*) over () + 1) * heavy.weight * p_key_concurrency as most,
            ring.ready, ring.head, ring.head_seq, ring.alive
        from ring
        left join penstock.key_weights on key_weights.name = p_name and key_weights.key = ring.key
        cross join lateral (
            select case when ring.step = 0 then p_turn_left else coalesce(key_weights.weight, 1) end as weight
        ) as heavy
        where ring.startable
    ),
    queued as (
        -- When a key gets one job and its first one is ready, the walk has found it already.
        select turns.turn, turns.weight, turns.head as ctid, 1::bigint as nth, turns.alive as startable
        from turns
        where p_key_concurrency = 1 and p_key_rate_limit is null and turns.ready and turns.most = 1
        union all
        select
            turns.turn, turns.weight, front.ctid, front.nth,
            case
                when p_key_concurrency > 1 then
                    front.startable and front.nth_startable <= p_key_concurrency * p_depth - front.running
                else front.startable_until_here
            end as startable
        from turns
        cross join lateral (
            select
                job.ctid,
                row_number() over (order by job.seq) as nth,
                job.startable,
                bool_and(job.startable) over (order by job.seq) as startable_until_here,
                count(*) filter (where job.startable) over (order by job.seq) as nth_startable,
                count(*) filter (where job.running) over () as running
            from (
                select
                    each.ctid, each.seq,
                    each.status = 'in-progress' as running,
                    each.status = 'queued' and each.run_after <= p_moment
                        and (each.expires_at is null or each.expires_at > p_moment)
                        and (not p_sealed or penstock.has_key_for(each.data, each.message, p_keys)) as startable
                from penstock.queued_jobs as each
                where each.name = p_name
                    and each.slot = turns.slot
                    and each.seq is not null
                    and each.key collate "C" = turns.key
                    -- From the lowest visible number, which the walk has found, passing over only the jobs that the caller
                    -- holds: a job that becomes visible late is taken before those that follow it.
                    and each.seq >= turns.head_seq
                    and (each.status = 'queued' or p_key_concurrency > 1 or not p_held_keys ? turns.key)
                order by each.seq
                limit case when p_key_rate_limit is null then turns.most
                    else greatest(0, least(turns.most, penstock.rate_room(p_name, turns.key, p_key_rate_limit, p_key_rate_period, p_moment)))
                end
            ) as job
        ) as front
        where not (p_key_concurrency = 1 and p_key_rate_limit is null and turns.ready and turns.most = 1)
    ),
    ranked as (
        -- By rounds. A key gets the whole of its first turn, even if that is a little more than there is room for; only the
        -- limits of the type are never passed. A turn that they cut short goes on in the next claim.
        select
            placed.ctid, placed.turn, placed.nth, placed.round,
            placed.place <= p_room or (placed.round = 0 and p_whole_turns) as taken
        from (
            select
                queued.ctid, queued.turn, queued.nth, (queued.nth - 1) / queued.weight as round,
                row_number() over (order by (queued.nth - 1) / queued.weight, queued.turn, queued.nth) as place
            from queued
            where queued.startable
        ) as placed
    )
    select ranked.ctid, ranked.turn, ranked.nth, null::integer, null::text, null::double precision, null::integer, null::text,
        null::text
    from ranked
    where ranked.taken
    union all
    select
        null, null, null,
        p_slots[coalesce(cut_at.place, walked.place)],
        coalesce(cut_at.key, walked.key),
        extract(epoch from walked.due - p_moment)::double precision,
        cut.jobs,
        (select jsonb_object_agg(turns.key, turns.weight)::text from turns where turns.weight > 1),
        case when p_sealed then (
            select jsonb_agg(distinct jsonb_build_array(p_slots[locked.place], locked.lacks))::text
            from (
                select ring.place, ring.lacks
                from ring
                where ring.lacks is not null
                    and not (
                        p_keys_paused
                        and exists (select from penstock.paused_keys as paused where paused.name = p_name and paused.key = ring.key)
                    )
                limit 1000
            ) as locked
        ) end
    from (
        select
            (array_agg(ring.place order by ring.step desc))[1] as place,
            (array_agg(ring.key order by ring.step desc))[1] as key,
            min(case
                when ring.due > p_moment then ring.due
                when ring.startable and p_key_rate_limit is not null then p_moment + p_key_rate_period / 50
            end) as due
        from ring
    ) as walked
    left join (
        select ranked.turn, count(*)::integer as jobs
        from ranked
        where not ranked.taken and ranked.round = 0
        group by ranked.turn
        order by ranked.turn
        limit 1
    ) as cut on true
    left join ring as cut_at on cut_at.step = cut.turn
$$;
comment on function penstock.choose_of_keys(
    text, integer[], text, boolean, integer, integer, integer, boolean, integer, integer, jsonb, boolean, integer, interval, timestamptz, boolean, text[]
) is
    'Part of claim_keys: the jobs to be claimed, of each key that the walk finds (turn) from the front of its key queue (nth), and a last row without a job that says where the walk ended, as claim_keys returns it. p_turn_left: how many jobs the turn of p_after_key has left, 0: none. p_whole_turns: whether a key gets the whole of its first turn even past p_room.';

-- Enqueue for clients without arrays: many jobs as one JSON document.

create or replace function penstock.moment(p_time jsonb, p_what text)
returns timestamptz
language sql
stable
as $$
    select case jsonb_typeof(p_time)
        when 'number' then penstock.clock() + make_interval(secs => p_time::double precision)
        else penstock.zoned_time(p_time #>> '{}', p_what)
    end
$$;
comment on function penstock.moment(jsonb, text) is
    'Converts a time in JSON: text with its zone, or a number of seconds from now, so that only the clock of the database counts. p_what: its name, for messages.';

create or replace function penstock.enqueue_json(p_name text, p_jobs jsonb)
returns table (ordinal integer, id uuid, outcome text)
language plpgsql
security definer
set search_path = penstock, pg_temp
as $$
#variable_conflict use_column
declare
    known constant text[] := array['data', 'id', 'key', 'priority', 'run_after', 'expires_at', 'unique_key'] || penstock.own_options();
    batch record;
begin
    perform penstock.check_documents(p_jobs, known, 'job', '{"data": {"shipmentId": "shp_123"}, "key": "acme"}');
    begin
        select
            array_agg(coalesce(job -> 'data', '{}') order by place) as data,
            array_agg(coalesce(regexp_replace(job ->> 'id', '^job_', '')::uuid, penstock.new_id()) order by place) as ids,
            array_agg(job ->> 'key' order by place) as keys,
            array_agg((job ->> 'priority')::smallint order by place) as priorities,
            array_agg(penstock.moment(job -> 'run_after', 'run_after') order by place) as run_after,
            array_agg(penstock.moment(job -> 'expires_at', 'expires_at') order by place) as expires_at,
            array_agg(job ->> 'unique_key' order by place) as unique_keys,
            array_agg(
                (
                    select jsonb_object_agg(option.key, option.value)
                    from jsonb_each(job) as option
                    where option.key = any (penstock.own_options()) and option.value <> 'null'
                )
                order by place
            ) as options
        into batch
        from jsonb_array_elements(p_jobs) with ordinality as given (job, place);
    exception
        when data_exception then
            raise exception 'invalid job: %', sqlerrm
                using errcode = 'PS400', hint = 'id is a UUID, priority a number, run_after and expires_at are times such as "2026-01-31T12:00:00Z", or seconds from now.';
    end;
    return query
    select given.place::integer, coalesce(enqueued.id, given.id), coalesce(enqueued.outcome, 'queued')
    from unnest(batch.ids) with ordinality as given (id, place)
    left join penstock.enqueue_many(
        p_name, coalesce(batch.data, '{}'), coalesce(batch.ids, '{}'),
        case when num_nonnulls(variadic batch.keys) > 0 then batch.keys end,
        case when num_nonnulls(variadic batch.priorities) > 0 then batch.priorities end,
        case when num_nonnulls(variadic batch.run_after) > 0 then batch.run_after end,
        case when num_nonnulls(variadic batch.expires_at) > 0 then batch.expires_at end,
        case when num_nonnulls(variadic batch.unique_keys) > 0 then batch.unique_keys end,
        null,
        case when num_nonnulls(variadic batch.options) > 0 then batch.options end
    ) as enqueued on enqueued.ordinal = given.place
    order by given.place;
end
$$;
comment on function penstock.enqueue_json(text, jsonb) is
    'enqueue_many for clients without arrays: a JSON array of {data, id, key, priority, run_after, expires_at, unique_key, max_attempts, time_limit, unique_for, traceparent, after, when, group}, each optional; times are text with their zone, or numbers of seconds from now; a span is an interval, or a number of seconds.';

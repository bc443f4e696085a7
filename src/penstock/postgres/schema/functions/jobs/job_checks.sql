-- What a job may be. The statement that inserts the rows checks each job on its way (is_odd_job, admit_job): a look at all of them before
-- the insert costs as much again as the checks. When one is refused, check_jobs finds which one and says why.

create or replace function penstock.first_refused_id(p_moment timestamptz)
returns uuid
language sql
immutable
parallel safe
as $$
    -- Ids compare like their times.
    select (lpad(to_hex((extract(epoch from p_moment + interval '1 day') * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid
$$;
comment on function penstock.first_refused_id(timestamptz) is
    'Part of enqueue_many: the first UUIDv7 that lies more than a day ahead of this moment; from it on they are refused.';

create or replace function penstock.is_odd_job(
    p_data jsonb, p_id uuid, p_key text, p_priority smallint, p_unique_key text, p_first_refused_id uuid
)
returns boolean
language sql
stable
parallel safe
as $$
    -- Without a statement of its own in it, so that it becomes a part of the condition in which it stands.
    select p_data is null
        or penstock.is_odd(p_data)
        or p_id is null
        or (p_id > p_first_refused_id and get_byte(uuid_send(p_id), 6) >> 4 = 7)
        or not penstock.is_key(p_key)
        or not penstock.is_key(p_unique_key)
        or p_priority not between -100 and 100
$$;
comment on function penstock.is_odd_job(jsonb, uuid, text, smallint, text, uuid) is
    'Part of enqueue_many: whether something is wrong with a job, or may be: only problem_of can tell whether something is wrong with a large payload.';

create or replace function penstock.admit_job(
    p_name text, p_data jsonb, p_id uuid, p_key text, p_priority smallint, p_unique_key text, p_first_refused_id uuid
)
returns boolean
language plpgsql
as $$
begin
    if penstock.is_odd_job('null', p_id, p_key, p_priority, p_unique_key, p_first_refused_id)
        or p_data is null
        or penstock.problem_of(p_data) is not null
    then
        raise exception 'a job of % cannot be enqueued', p_name
            using errcode = 'PS400';
    end if;
    if pg_column_size(p_data) > 16384 then
        perform penstock.note_large(p_name);
    end if;
    return true;
end
$$;
comment on function penstock.admit_job(text, jsonb, uuid, text, smallint, text, uuid) is
    'Part of enqueue_many, for a job that is odd: notes a large payload, and raises PS400 unless the job can be enqueued. check_jobs says why it cannot.';

create or replace function penstock.check_jobs(
    p_name text, p_data jsonb[], p_ids uuid[], p_keys text[], p_priorities smallint[], p_unique_keys text[], p_moment timestamptz
)
returns void
language plpgsql
as $$
declare
    first_refused_id constant uuid := penstock.first_refused_id(p_moment);
    -- Without ids, one that is not refused for each.
    ids constant uuid[] := coalesce(p_ids, array_fill('00000000-0000-0000-0000-000000000000'::uuid, array[cardinality(p_data)]));
    place bigint;
    problem text;
    advice text;
begin
    -- One check of the whole batch, which suffices when all jobs are valid and small.
    perform
    from unnest(p_data, ids, p_keys, p_priorities, p_unique_keys) as job (data, id, key, priority, unique_key)
    where penstock.is_odd_job(job.data, job.id, job.key, job.priority, job.unique_key, first_refused_id)
    limit 1;
    if not found then
        return;
    end if;
    place := penstock.first_problem(p_data);
    if place is not null then
        perform penstock.refuse(
            format('job %s of %s for %s: data', place, cardinality(p_data), p_name), penstock.problem_of(p_data[place])
        );
    end if;
    if exists (select from unnest(p_data) as given where pg_column_size(given) > 16384) then
        perform penstock.note_large(p_name);
    end if;
    select min(job.place) into place
    from unnest(p_data, ids, p_keys, p_priorities, p_unique_keys)
        with ordinality as job (data, id, key, priority, unique_key, place)
    where job.data is null
        or penstock.is_odd_job('null', job.id, job.key, job.priority, job.unique_key, first_refused_id);
    if place is null then
        return;
    end if;
    case
        when p_data[place] is null then
            problem := 'data is null';
            advice := 'Give each job a JSON payload; JSON null is written ''null''::jsonb.';
        when not penstock.is_key(p_keys[place]) then
            problem := 'invalid key ' || quote_literal(left(p_keys[place], 100));
            advice := 'A key has 1 to 255 characters and no control characters.';
        when not penstock.is_key(p_unique_keys[place]) then
            problem := 'invalid unique key ' || quote_literal(left(p_unique_keys[place], 100));
            advice := 'A unique key has 1 to 255 characters and no control characters.';
        when p_priorities[place] not between -100 and 100 then
            problem := 'priority ' || p_priorities[place] || ' is out of range';
            advice := 'A priority is a number from -100 (first) to 100 (last).';
        when p_ids[place] is null then
            problem := 'id is null';
            advice := 'Give an id for every job, or none at all.';
        else
            problem := 'id ' || p_ids[place] || ' is a UUIDv7 from the future';
            advice := 'Correct the clock of the machine that made it.';
    end case;
    raise exception 'job % of % for %: %', place, cardinality(p_data), p_name, problem
        using errcode = 'PS400', hint = advice;
end
$$;
comment on function penstock.check_jobs(text, jsonb[], uuid[], text[], smallint[], text[], timestamptz) is
    'Part of enqueue_many, commit_staged and the changes of standing jobs: raises PS400 or PS413 for the first job of a batch that cannot be enqueued.';

create or replace function penstock.own_options()
returns text[]
language sql
immutable
parallel safe
as $$
    select array['max_attempts', 'time_limit', 'unique_for', 'traceparent', 'after', 'when', 'group']
$$;
comment on function penstock.own_options() is 'The names of what a job can have of its own: options in place of those of its type, its trace context, the jobs after which it runs, and its job group.';

create or replace function penstock.options_of_jobs(p_type penstock.jobs, p_options jsonb[])
returns jsonb[]
language plpgsql
immutable
as $$
declare
    given jsonb;
    attempts numeric;
    spans jsonb;
    options jsonb[] := '{}';
    problem text;
begin
    foreach given in array p_options loop
        attempts := null;
        spans := null;
        problem := null;
        if jsonb_typeof(given) <> 'null' then
            perform penstock.check_options(given, penstock.own_options(), '{"max_attempts": 1, "time_limit": "10 seconds"}');
            if given ?| array['after', 'when'] then
                given := penstock.checked_after(p_type.name, given);
            end if;
            if given ? 'group' then
                perform penstock.check_group_id(p_type.name, given ->> 'group');
            end if;
            begin
                attempts := (given ->> 'max_attempts')::numeric;
                select jsonb_object_agg(
                    option.key,
                    case jsonb_typeof(option.value)
                        when 'number' then option.value::double precision
                        else extract(epoch from (option.value #>> '{}')::interval)
                    end
                ) into spans
                from jsonb_each(given) as option
                where option.key in ('time_limit', 'unique_for') and option.value <> 'null';
            exception
                when data_exception then
                    problem := sqlerrm;
            end;
        end if;
        problem := case
            when problem is not null then problem
            when attempts <> trunc(attempts) or attempts not between 1 and 32767 then format('max_attempts must be 1 to 32767, not %s', attempts)
            when attempts > 1 and p_type.delivery_strategy = 'at_most_once' then format('a job of an at_most_once type has 1 attempt, not %s', attempts)
            else (
                select format('%s must be positive and at most 30 days, not %s', span.key, given ->> span.key)
                from jsonb_each(spans) as span
                -- As text: an infinite span is none of JSON's numbers.
                where not ((span.value #>> '{}')::double precision > 0 and (span.value #>> '{}')::double precision <= 2592000)
                limit 1
            )
        end;
        if problem is not null then
            raise exception 'invalid options of a job of %: %', p_type.name, problem
                using errcode = 'PS400', hint = 'For example: {"max_attempts": 1, "time_limit": "10 seconds"}.';
        end if;
        -- Numbers and spans in one form; any other option as it was given, so that none is lost.
        options := array_append(
            options,
            nullif(
                jsonb_strip_nulls(
                    case when jsonb_typeof(given) = 'object' then given else '{}' end
                    || jsonb_build_object(
                        'max_attempts', attempts,
                        'traceparent', case when given ? 'traceparent' then penstock.valid_traceparent(given ->> 'traceparent') end
                    )
                )
                    || coalesce(spans, '{}'),
                '{}'
            )
        );
    end loop;
    return options;
end
$$;
comment on function penstock.options_of_jobs(penstock.jobs, jsonb[]) is
    'Part of enqueue_many: the options of single jobs as they are stored, spans in seconds; null for a job without any. Raises PS400 for what a job of the type cannot have.';

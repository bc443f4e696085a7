-- Trace context: to which trace a job, an event or a message belongs, as W3C Trace Context writes it (traceparent). A producer gives it
-- with each job, or says it for its transaction: set local penstock.traceparent = '00-...'. It is stored with the options of a job and in
-- the headers of an event. It only observes: what is not valid is left out, and never an error.

create or replace function penstock.valid_traceparent(p_text text)
returns text
language sql
immutable
parallel safe
as $$
    -- Of a later version of the format the part that this version knows, as the specification wants it.
    select case
        when p_text ~ '^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$' then p_text
        when p_text ~ '^(?!00|ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-|$)' then '00' || substr(p_text, 3, 53)
    end
$$;
comment on function penstock.valid_traceparent(text) is 'The traceparent in this text (W3C Trace Context); null when it has none.';

create or replace function penstock.current_traceparent()
returns text
language sql
stable
as $$
    select case
        when current_setting('penstock.traceparent', true) > ''
            then penstock.valid_traceparent(current_setting('penstock.traceparent', true))
    end
$$;
comment on function penstock.current_traceparent() is
    'The trace context of the transaction: set local penstock.traceparent = ''00-...''. Null: it has none, or one that is not valid.';

create or replace function penstock.traced_options(p_options jsonb[], p_traceparent text, p_size integer)
returns jsonb[]
language sql
immutable
as $$
    select case
        when p_options is null then array_fill(jsonb_build_object('traceparent', p_traceparent), array[p_size])
        else array(
            select jsonb_build_object('traceparent', p_traceparent) || coalesce(given.options, '{}')
            from unnest(p_options) with ordinality as given (options, place)
            order by given.place
        )
    end
$$;
comment on function penstock.traced_options(jsonb[], text, integer) is
    'Part of enqueue_many: the options of jobs with the trace context of the transaction, where they have none of their own.';

create or replace function penstock.traced_headers(p_headers json[], p_traceparent text, p_size integer)
returns json[]
language sql
immutable
as $$
    select array(
        select case
            when given.header is null or json_typeof(given.header) = 'null' then json_build_object('traceparent', p_traceparent)
            -- As text, since headers may hold JSON that jsonb does not take.
            when json_typeof(given.header) = 'object' and strpos(given.header::text, '"traceparent"') = 0
                then (
                    '{"traceparent":"' || p_traceparent
                    || case
                        when given.header::text ~ '^[[:space:]]*[{][[:space:]]*[}][[:space:]]*$' then '"}'
                        else '",' || regexp_replace(given.header::text, '^[[:space:]]*[{]', '')
                    end
                )::json
            else given.header
        end
        from unnest(coalesce(p_headers, array_fill(null::json, array[p_size]))) with ordinality as given (header, place)
        order by given.place
    )
$$;
comment on function penstock.traced_headers(json[], text, integer) is
    'Part of append_many: the headers of events with the trace context of the transaction, where they have none of their own.';

create or replace function penstock.untraced_header(p_header json)
returns text
language sql
immutable
parallel safe
as $$
    select case
        when strpos(p_header::text, '"traceparent"') = 0 then p_header::text
        -- What is added to headers stands before them, so that the rest is what was given. It need not be JSON.
        else nullif(regexp_replace(p_header::text, '"traceparent"[[:space:]]*:[[:space:]]*"[^"]*"[[:space:]]*,?[[:space:]]*', ''), '{}')
    end
$$;
comment on function penstock.untraced_header(json) is
    'Part of digest_of: the headers of an event without the trace context, since a batch that is sent again may belong to another trace.';

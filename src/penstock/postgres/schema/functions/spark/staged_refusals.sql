-- What commit_staged refuses of the jobs that are staged.

create or replace function penstock.refuse_staged(p_writer text, p_parts text[], p_moment timestamptz)
returns void
language plpgsql
as $$
declare
    wrong record;
begin
    for wrong in
        select staged.*
        from penstock.staged_jobs as staged
        where staged.writer = p_writer
            and staged.role = session_user
            and staged.part = any (p_parts)
            and (
                octet_length(staged.data) > 1048576
                or penstock.problem_of(staged.data::jsonb) is not null
                or staged.run_after <> penstock.shown_time(staged.run_after)
                or staged.expires_at <> penstock.shown_time(staged.expires_at)
                or not penstock.is_key(staged.key)
                or staged.priority not between -100 and 100
            )
    loop
        perform penstock.check_jobs(
            wrong.name, array[wrong.data::jsonb], null, array[wrong.key], array[wrong.priority], null, p_moment
        );
        perform penstock.check_times(array[wrong.run_after, wrong.expires_at]);
    end loop;
end
$$;
comment on function penstock.refuse_staged(text, text[], timestamptz) is
    'Part of commit_staged: refuses with the words of enqueue_many what enqueue_many would refuse.';

create or replace function penstock.refuse_unreadable(p_writer text, p_parts text[])
returns void
language plpgsql
as $$
declare
    staged record;
begin
    for staged in
        select jobs.part, jobs.place, jobs.name, jobs.data, jobs.id
        from penstock.staged_jobs as jobs
        where jobs.writer = p_writer and jobs.role = session_user and jobs.part = any (p_parts)
    loop
        begin
            perform staged.id::uuid;
            perform staged.data::jsonb;
        exception
            when data_exception then
                -- Without the text itself, which is a payload.
                raise exception 'the job % of part % that is staged for % has %', staged.place, left(staged.part, 100), left(staged.name, 100),
                    case when sqlerrm like '%uuid%' then 'an id that is no UUID' else 'data that is no JSON' end
                    using errcode = 'PS400', hint = 'Write jobs whose data is JSON text and whose id is a UUID or null. What is staged by hand, discard_staged removes.';
        end;
    end loop;
end
$$;
comment on function penstock.refuse_unreadable(text, text[]) is
    'Part of commit_staged: raises PS400 for a staged job whose data is no JSON or whose id is no UUID: the columns are text, as they were written or staged by hand.';
